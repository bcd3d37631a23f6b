//! Runs a range of seeds: `sweep FIRST COUNT [LOG_LINES] [max_failures]`.
use quipu_sim::{Options, run};
fn main() {
    let args: Vec<u64> = std::env::args().skip(1).map(|a| a.parse().unwrap()).collect();
    let (first, count) = (args[0], args[1]);
    let log = args.get(2).copied().unwrap_or(0) as usize;
    let most = args.get(3).copied().unwrap_or(10);
    let (mut ops, mut errors, mut bytes, mut faults, mut bad) = (0, 0, 0, 0, 0);
    let mut c = quipu_sim::Counters::default();
    let start = std::time::Instant::now();
    let mut slow = Vec::new();
    std::panic::set_hook(Box::new(|i| {
        eprintln!("{i}");
        if std::env::var("BT").is_ok() {
            eprintln!("{}", std::backtrace::Backtrace::force_capture());
        }
    }));
    for seed in first..first + count {
        let t = std::time::Instant::now();
        let r = run(seed, &Options { log_lines: log, ..Options::default() });
        slow.push((t.elapsed(), seed, r.events, r.bytes));
        ops += r.ops;
        errors += r.errors;
        bytes += r.bytes;
        faults += r.faults;
        let k = r.counters;
        c.segments += k.segments;
        c.lost += k.lost;
        c.corrupted += k.corrupted;
        c.timed_out += k.timed_out;
        c.killed += k.killed;
        c.links += k.links;
        c.bells += k.bells;
        c.streams += k.streams;
        c.retransmitted += k.retransmitted;
        if let Some(f) = r.failure {
            for l in &f.log {
                println!("{l}");
            }
            println!(
                "{}",
                f.to_string().lines().next().unwrap().chars().take(400).collect::<String>()
            );
            bad += 1;
            if bad >= most {
                break;
            }
        }
    }
    slow.sort();
    slow.reverse();
    println!(
        "{bad} failures, {ops} ops, {errors} error completions, {bytes} bytes, {faults} faults, {c:?}, {:?}",
        start.elapsed()
    );
    println!("slowest {:?}", &slow[..3.min(slow.len())]);
}
