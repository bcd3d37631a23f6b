//! What `quipu top` shows of the processes that run under `quipu sockets`.

use std::fmt::Write as _;

use quipu_sockets::report::Totals;

use super::super::sockets::Process;
use super::model::{Row, short};

/// The headings of processes. Octets are those sent and received, through memory and over TCP.
pub(super) const COLUMNS: [&str; 8] =
    ["PROCESS", "PROGRAM", "SOCKETS", "RAISED", "LOWERED", "MEMORY", "TCP", "WAKE-UPS"];

fn memory(totals: &Totals) -> u64 {
    totals.sent.0 + totals.received.0
}

fn tcp(totals: &Totals) -> u64 {
    totals.sent.1 + totals.received.1
}

/// One row for each process that has raised a connection, in the order of processes.
pub(super) fn rows(processes: &[Process]) -> Vec<Row> {
    let raised = processes.iter().filter_map(|process| process.totals.map(|it| (process, it)));
    let cells = raised.map(|(process, totals)| {
        vec![
            process.number.to_string(),
            process.program.clone(),
            process.rows.len().to_string(),
            totals.raised.to_string(),
            totals.lowers.to_string(),
            short(memory(&totals) as f64),
            short(tcp(&totals) as f64),
            short(totals.wake_ups as f64),
        ]
    });
    cells.map(Row::calm).collect()
}

/// A family of the page: its name, type and help, and what of a process it shows.
type Family = (&'static str, &'static str, &'static str, fn(&Totals) -> u64);

const FAMILIES: [Family; 9] = [
    ("quipu_sockets_raised", "gauge", "Connections that are raised to memory.", |it| it.raised),
    ("quipu_sockets_raises_total", "counter", "Connections that were raised.", |it| it.raises),
    ("quipu_sockets_lowers_total", "counter", "Raised connections that went back to TCP.", |it| {
        it.lowers
    }),
    ("quipu_sockets_wake_ups_total", "counter", "Sleeps for something to receive.", |it| {
        it.wake_ups
    }),
    ("quipu_sockets_withdrawals_total", "counter", "Times that octets were taken back.", |it| {
        it.withdrawals
    }),
    ("quipu_sockets_memory_sent_bytes_total", "counter", "Octets sent by memory.", |it| it.sent.0),
    ("quipu_sockets_tcp_sent_bytes_total", "counter", "Octets sent over TCP.", |it| it.sent.1),
    ("quipu_sockets_memory_received_bytes_total", "counter", "Octets received by memory.", |it| {
        it.received.0
    }),
    ("quipu_sockets_tcp_received_bytes_total", "counter", "Octets received over TCP.", |it| {
        it.received.1
    }),
];

/// The part of the page for Prometheus.
pub(super) fn page(processes: &[Process]) -> String {
    let mut out = String::new();
    if processes.iter().all(|process| process.totals.is_none()) {
        return out;
    }
    for (name, kind, help, value) in FAMILIES {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for process in processes {
            let Some(totals) = &process.totals else { continue };
            let program = process.program.replace('\\', "\\\\").replace('"', "\\\"");
            let labels = format!("process=\"{}\",program=\"{program}\"", process.number);
            let _ = writeln!(out, "{name}{{{labels}}} {}", value(totals));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(number: u32, totals: Option<Totals>) -> Process {
        Process { number, program: "a \"b\"".into(), totals, is_unseen: false, rows: Vec::new() }
    }

    #[test]
    fn processes_with_raised_connections_are_shown() {
        let totals = Totals {
            raised: 2,
            raises: 5,
            lowers: 1,
            wake_ups: 1500,
            sent: (1_000_000, 10),
            received: (500_000, 20),
            withdrawals: 3,
        };
        let processes = [process(7, Some(totals)), process(8, None)];
        let rows = rows(&processes);
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].cells.join(" "), "7 a \"b\" 0 2 1 1.5M 30 1.5k");
        let page = page(&processes);
        let labels = "{process=\"7\",program=\"a \\\"b\\\"\"}";
        assert!(page.contains(&format!("\nquipu_sockets_raises_total{labels} 5\n")), "{page}");
        assert!(page.contains(&format!("quipu_sockets_memory_sent_bytes_total{labels} 1000000\n")));
        assert_eq!(page.lines().count(), 3 * FAMILIES.len());
        assert_eq!(super::page(&processes[1..]), "");
    }
}
