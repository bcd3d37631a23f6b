//! What people get to see.

mod goodput;
mod qpip;
mod svg;
mod table;

pub(crate) use goodput::list as goodput_list;
pub(crate) use qpip::{list as qpip_list, plot as qpip_plot};
pub(crate) use svg::plot;
pub(crate) use table::{Listed, list, text};

/// A size: bytes with the largest unit that leaves a whole number.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{} MB", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{} KB", b >> 10),
        b => format!("{b} B"),
    }
}

/// Three significant digits.
pub(crate) fn digits(value: f64) -> String {
    match value.abs() {
        v if !v.is_finite() => "-".into(),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.1 => format!("{value:.2}"),
        v if v >= 0.01 => format!("{value:.3}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(
            [size(1), size(1024), size(1500), size(8 << 20)],
            ["1 B", "1 KB", "1500 B", "8 MB"]
        );
        assert_eq!(
            [digits(123.4), digits(12.34), digits(1.234), digits(0.0123)],
            ["123", "12.3", "1.23", "0.012"]
        );
        assert_eq!(digits(f64::NAN), "-");
    }
}
