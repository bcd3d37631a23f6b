//! Results as text.

use std::fmt::Write;

use super::Report;
use crate::hca::HcaReport;
use crate::ledger::Category;

/// Runs in rows: bandwidth, misses, idle time.
#[must_use]
pub fn table(rows: &[(String, Report)]) -> String {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0).max(4);
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{:<width$}  {:>7} {:>7} {:>7} {:>8} {:>8} {:>6} {:>8}",
        "plan", "Gbit/s", "rx", "tx", "goodput", "miss/KB", "idle%", "dropped"
    );
    for (name, report) in rows {
        let _ = writeln!(
            text,
            "{name:<width$}  {:>7.2} {:>7.2} {:>7.2} {:>8.2} {:>8.2} {:>6.1} {:>8}",
            report.gbps,
            report.rx_gbps,
            report.tx_gbps,
            report.goodput_gbps,
            report.misses_per_kb,
            report.percent(Category::Idle),
            report.dropped,
        );
    }
    text
}

/// Where the time of a run went, and the other numbers.
#[must_use]
pub fn breakdown(report: &Report) -> String {
    let mut text = String::new();
    for share in &report.cpu {
        let bar = "#".repeat((share.percent / 2.0).round() as usize);
        let _ = writeln!(text, "  {:<10} {:>5.1} %  {bar}", share.category.name(), share.percent);
    }
    if let Some(hca) = &report.hca {
        streams(&mut text, hca);
    } else if !report.stages.is_empty() {
        stages(&mut text, report);
    } else {
        memory(&mut text, report);
    }
    if report.requests_per_second > 0.0 {
        let _ = writeln!(text, "  {:.0} requests/s", report.requests_per_second);
    }
    let _ = writeln!(
        text,
        "  {} lost, {} sent again; {} events in {:.1} ms, trace {}",
        report.lost, report.retransmitted, report.events, report.simulated_ms, report.trace_hash
    );
    text
}

/// What each stream of an HCA got.
fn streams(text: &mut String, hca: &HcaReport) {
    let _ = writeln!(text, "  stream  from  SL  VL   Gbit/s  sender's core  receiver's core");
    for it in &hca.streams {
        let kind = format!("{:?}", it.kind).to_lowercase();
        let _ = writeln!(
            text,
            "  {kind:<6}  {:>4}  {:>2}  {:>2}  {:>7.2}  {:>11.0} %  {:>13.0} %",
            it.from, it.sl, it.lane, it.gbps, it.send_cpu, it.receive_cpu
        );
    }
    let _ = writeln!(
        text,
        "  {:.0} % of the packets had to be chosen between lanes; the bus was busy for {:.0} %",
        hca.contested, hca.bus
    );
}

/// Tables 2 and 3 of the QPIP paper.
fn stages(text: &mut String, report: &Report) {
    for (table, ways) in [(2, "sent"), (3, "received")] {
        let _ = writeln!(text, "  {ways:<18} {:>8} {:>8}  (us)", "data", "ack");
        for stage in report.stages.iter().filter(|stage| stage.table == table) {
            let (data, ack) = (stage.data_us, stage.ack_us);
            let _ = writeln!(text, "    {:<16} {data:>8.2} {ack:>8.2}", stage.stage);
        }
    }
}

fn memory(text: &mut String, report: &Report) {
    let _ = writeln!(
        text,
        "  memory {:.1} Gbit/s, {:.4} interrupts/KB, {:.3} bit/cycle",
        report.dram_gbps, report.interrupts_per_kb, report.bits_per_cycle
    );
}
