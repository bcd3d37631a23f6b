//! What a test has measured, as a table and as JSON.

use std::time::Duration;

use serde_json::{Value, json};

use super::words::{Counts, Params, Results, StreamResults};

/// What a stream has moved in a while.
pub(super) struct Interval {
    pub(super) id: u64,
    /// On this side.
    pub(super) sends: bool,
    /// Since what counts began.
    pub(super) from: Duration,
    pub(super) to: Duration,
    pub(super) counts: Counts,
}

/// What this side has measured.
pub(super) struct Outcome {
    pub(super) took: Duration,
    /// Whether this side has sent, of each stream.
    pub(super) sends: Vec<bool>,
    pub(super) results: Results,
}

/// Says what happens, at once in words or at the end as JSON.
pub(super) struct Report {
    json: bool,
    /// Of datagrams.
    udp: bool,
    start: Value,
    intervals: Vec<Value>,
    /// Octets that were sent and received by the last test.
    #[cfg(test)]
    pub(super) totals: (u64, u64),
}

/// Octets, in a width of their own.
fn transfer(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..=0xf_ffff => (1 << 10, "KB"),
        0x10_0000..=0x3fff_ffff => (1 << 20, "MB"),
        _ => (1 << 30, "GB"),
    };
    format!("{:>7.2} {name}", bytes as f64 / f64::from(unit))
}

fn bits_per_second(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 * 8.0 / seconds.max(1e-9)
}

/// How many segments were sent again; of datagrams how much the time varies that they take, and how many of
/// how many are lost.
fn rest(udp: bool, sends: bool, again: Option<u64>, counts: &Counts) -> String {
    match (udp, sends) {
        (false, _) => again.map_or_else(String::new, |again| format!("{again:>6}")),
        (true, true) => format!("{:>27}", counts.packets),
        (true, false) => {
            let lost = format!("{}/{}", counts.errors, counts.packets);
            let percent = lost_percent(counts.errors, counts.packets);
            format!("{:>7.3} ms {lost:>17} ({percent:.2} %)", counts.jitter * 1e3)
        }
    }
}

fn lost_percent(errors: u64, packets: u64) -> f64 {
    errors as f64 * 100.0 / (packets as f64).max(1.0)
}

fn line(id: &str, times: (f64, f64), bytes: u64, rest: &str, who: &str) -> String {
    let rate = bits_per_second(bytes, times.1 - times.0) / 1e6;
    let line = format!(
        "[{id:>3}] {:>6.2}-{:<6.2} s  {}  {rate:>9.1} Mbit/s {rest:>6}  {who}",
        times.0,
        times.1,
        transfer(bytes),
    );
    line.trim_end().to_owned()
}

const HEAD: &str = "[ ID]   interval         transfer          rate  again";
const UDP_HEAD: &str =
    "[ ID]   interval         transfer          rate        jitter        lost/total";

impl Report {
    pub(super) fn new(json: bool) -> Self {
        Self {
            json,
            udp: false,
            start: Value::Null,
            intervals: Vec::new(),
            #[cfg(test)]
            totals: (0, 0),
        }
    }

    pub(super) fn begin(&mut self, params: &Params, server: bool) {
        self.intervals.clear();
        self.udp = params.udp;
        self.start =
            json!({ "role": if server { "server" } else { "client" }, "test_start": params });
        if !self.json {
            println!("{}", if self.udp { UDP_HEAD } else { HEAD });
        }
    }

    /// What was said until now does not count.
    pub(super) fn omitted(&mut self) {
        self.intervals.clear();
        if !self.json {
            println!("- - - - - - - - - -  the lines above do not count");
        }
    }

    pub(super) fn interval(&mut self, streams: Vec<Interval>) {
        let udp = self.udp;
        let value = |counts: &Counts, it: &Interval| {
            let seconds = (it.to - it.from).as_secs_f64();
            let mut value = json!({
                "start": it.from.as_secs_f64(), "end": it.to.as_secs_f64(), "seconds": seconds,
                "bytes": counts.bytes, "bits_per_second": bits_per_second(counts.bytes, seconds),
                "sender": it.sends,
            });
            match udp {
                true => add_datagrams(&mut value, it.sends, counts),
                false => value["retransmits"] = counts.retransmits.into(),
            }
            value
        };
        let Some(first) = streams.first() else { return };
        let all = sum_of(streams.iter().map(|it| it.counts));
        if self.json {
            let each = streams.iter().map(|it| {
                let mut value = value(&it.counts, it);
                value["socket"] = it.id.into();
                value
            });
            let each: Vec<_> = each.collect();
            self.intervals.push(json!({ "streams": each, "sum": value(&all, first) }));
            return;
        }
        for it in &streams {
            let times = (it.from.as_secs_f64(), it.to.as_secs_f64());
            let again = it.sends.then_some(it.counts.retransmits);
            let rest = rest(udp, it.sends, again, &it.counts);
            println!("{}", line(&it.id.to_string(), times, it.counts.bytes, &rest, ""));
        }
        if streams.len() > 1 {
            let times = (first.from.as_secs_f64(), first.to.as_secs_f64());
            println!("{}", line("SUM", times, all.bytes, "", ""));
        }
    }

    pub(super) fn end(&mut self, outcome: &Outcome, theirs: &Results) {
        #[cfg(test)]
        for (sent, received) in pairs(outcome, theirs) {
            self.totals = (self.totals.0 + sent.bytes, self.totals.1 + received.bytes);
        }
        let text = if self.json {
            format!("{:#}", self.as_json(outcome, theirs))
        } else {
            table(self.udp, outcome, theirs)
        };
        println!("{text}");
    }

    fn as_json(&self, outcome: &Outcome, theirs: &Results) -> Value {
        let side = |it: &StreamResults, sender: bool| {
            let seconds = it.end_time - it.start_time;
            let mut value = json!({
                "socket": it.id, "seconds": seconds, "bytes": it.bytes,
                "bits_per_second": bits_per_second(it.bytes, seconds), "sender": sender,
            });
            match self.udp {
                true => add_datagrams(&mut value, sender, &counts(it)),
                false => value["retransmits"] = it.retransmits.0.into(),
            }
            value
        };
        let streams = pairs(outcome, theirs).into_iter().map(|(sent, received)| {
            json!({ "sender": side(&sent, true), "receiver": side(&received, false) })
        });
        let streams: Vec<_> = streams.collect();
        let sum = |which: fn(&(StreamResults, StreamResults)) -> &StreamResults| {
            // Some of the numbers are the peer's.
            let (mut bytes, mut seconds, mut again) = (0_u64, 0.0_f64, None::<u64>);
            for pair in &pairs(outcome, theirs) {
                let it = which(pair);
                bytes = bytes.saturating_add(it.bytes);
                seconds = seconds.max(it.end_time - it.start_time);
                let more = it.retransmits.0;
                again = more.map(|more| again.unwrap_or(0).saturating_add(more)).or(again);
            }
            json!({
                "seconds": seconds, "bytes": bytes,
                "bits_per_second": bits_per_second(bytes, seconds), "retransmits": again,
            })
        };
        let mut all = json!({
            "start": self.start,
            "intervals": self.intervals,
            "end": {
                "streams": streams,
                "sum_sent": sum(|pair| &pair.0),
                "sum_received": sum(|pair| &pair.1),
                "cpu_utilization_percent": {
                    "host_total": outcome.results.cpu_util_total,
                    "remote_total": theirs.cpu_util_total,
                },
            },
        });
        if self.udp {
            let of = |which: fn((StreamResults, StreamResults)) -> StreamResults| {
                sum_of(pairs(outcome, theirs).into_iter().map(|pair| counts(&which(pair))))
            };
            add_datagrams(&mut all["end"]["sum_sent"], true, &of(|pair| pair.0));
            add_datagrams(&mut all["end"]["sum_received"], false, &of(|pair| pair.1));
            all["end"]["sum"] = all["end"]["sum_received"].clone();
        }
        all
    }
}

/// Of each stream, what its sender has measured and what its receiver. A peer that says nothing of a stream
/// has moved nothing.
fn pairs(outcome: &Outcome, theirs: &Results) -> Vec<(StreamResults, StreamResults)> {
    let both = outcome.results.streams.iter().zip(&outcome.sends).map(|(ours, sends)| {
        let theirs = theirs.streams.iter().find(|it| it.id == ours.id).cloned();
        let theirs = theirs.unwrap_or_else(|| StreamResults { id: ours.id, ..ours.clone() });
        if *sends { (ours.clone(), theirs) } else { (theirs, ours.clone()) }
    });
    both.collect()
}

/// Of a stream, as one of the two has measured it.
fn counts(it: &StreamResults) -> Counts {
    let StreamResults { bytes, packets, errors, jitter, .. } = *it;
    Counts { bytes, packets, errors, jitter, retransmits: it.retransmits.0.unwrap_or(0) }
}

/// Of several streams; some of the numbers are the peer's. The jitter is that of the mean.
fn sum_of(streams: impl Iterator<Item = Counts>) -> Counts {
    let (mut sum, mut count) = (Counts::default(), 0.0);
    for it in streams {
        sum.bytes = sum.bytes.saturating_add(it.bytes);
        sum.retransmits = sum.retransmits.saturating_add(it.retransmits);
        sum.packets = sum.packets.saturating_add(it.packets);
        sum.errors = sum.errors.saturating_add(it.errors);
        count += 1.0;
        sum.jitter += (it.jitter - sum.jitter) / count;
    }
    sum
}

/// What iperf3 says of datagrams; of those that were sent only how many.
fn add_datagrams(value: &mut Value, sender: bool, counts: &Counts) {
    value["packets"] = counts.packets.into();
    if !sender {
        value["jitter_ms"] = (counts.jitter * 1e3).into();
        value["lost_packets"] = counts.errors.into();
        value["lost_percent"] = lost_percent(counts.errors, counts.packets).into();
    }
}

fn table(udp: bool, outcome: &Outcome, theirs: &Results) -> String {
    let mut out = vec!["- - - - - - - - - -".to_owned()];
    let pairs = pairs(outcome, theirs);
    let (mut sums, mut longest) = ([0_u64; 2], [0.0_f64; 2]);
    for (sent, received) in &pairs {
        for (index, (it, who)) in [(sent, "sent"), (received, "received")].into_iter().enumerate() {
            let times = (0.0, it.end_time - it.start_time);
            let again = it.retransmits.0.filter(|_| index == 0);
            let rest = rest(udp, index == 0, again, &counts(it));
            out.push(line(&it.id.to_string(), times, it.bytes, &rest, who));
            sums[index] = sums[index].saturating_add(it.bytes);
            longest[index] = longest[index].max(times.1);
        }
    }
    if pairs.len() > 1 {
        for (index, who) in ["sent", "received"].into_iter().enumerate() {
            out.push(line("SUM", (0.0, longest[index]), sums[index], "", who));
        }
    }
    out.push(format!(
        "{:.2} s; processor: here {:.0} %, there {:.0} %",
        outcome.took.as_secs_f64(),
        outcome.results.cpu_util_total,
        theirs.cpu_util_total
    ));
    out.join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::words::Known;
    use super::*;

    #[test]
    fn numbers_of_a_peer_that_are_too_large_are_the_largest() {
        let stream = |id, bytes, again| StreamResults {
            id,
            bytes,
            retransmits: Known(Some(again)),
            ..StreamResults::default()
        };
        let results = |bytes, again| Results {
            streams: (0..3).map(|id| stream(id, bytes, again)).collect(),
            ..Results::default()
        };
        let ours = results(1, 0);
        let outcome = Outcome { took: Duration::ZERO, sends: vec![false; 3], results: ours };
        let theirs = results(u64::MAX, i64::MAX as u64);
        let report = Report {
            json: true,
            udp: false,
            start: Value::Null,
            intervals: Vec::new(),
            totals: (0, 0),
        };
        let end = &report.as_json(&outcome, &theirs)["end"];
        assert_eq!(end["sum_sent"]["bytes"], u64::MAX);
        assert_eq!(end["sum_sent"]["retransmits"], u64::MAX);
        assert_eq!(end["sum_received"]["bytes"], 3);
        assert!(table(false, &outcome, &theirs).contains("SUM"));
    }
}
