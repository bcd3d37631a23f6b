//! Tables for people.

use std::io::{self, Write};

/// Writes lines whose columns are as wide as their widest cell. The last column is not padded.
pub(crate) fn table(out: &mut impl Write, lines: &[Vec<String>]) -> io::Result<()> {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for line in lines {
        let padded = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let text = padded.collect::<Vec<_>>().join("  ");
        writeln!(out, "{}", text.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut out = Vec::new();
        let line = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        table(&mut out, &[line(["a", "bb"]), line(["ccc", "d"])]).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "a    bb\nccc  d\n");
    }
}
