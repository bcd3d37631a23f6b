//! `quipu top`: what all engines of the user on this machine do.

mod extended;
mod listen;
mod model;
mod screen;
mod sockets;

use std::io::{self, IsTerminal};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use quipu_host::Interrupts;
use quipu_host::counters::observe::prometheus;
use quipu_host::counters::{epoch_ns, samples};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use self::model::Model;
use super::failure::Failure;
use serde_json::Value;

use super::sockets::processes;

/// How long a signal may take to end it.
const LATENCY: Duration = Duration::from_millis(100);

/// What to show, and how.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    /// Print the tables once, after one interval (rates need one), and exit.
    #[arg(long, group = "how")]
    once: bool,
    /// Print everything once, as JSON.
    #[arg(long, group = "how")]
    json: bool,
    /// Print everything once, in Prometheus' text format.
    #[arg(long, group = "how")]
    prometheus: bool,
    /// Serve http://ADDRESS:PORT/metrics for Prometheus until interrupted, such as 127.0.0.1:9400.
    #[arg(long, group = "how", value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Seconds between two samples.
    #[arg(long, short, default_value = "1", value_name = "SECONDS",
          value_parser = clap::value_parser!(u16).range(1..=3600))]
    interval: u16,
}

const EXAMPLES: &str = "\
Examples:
  quipu top                                 engines and queue pairs, until you press q
  quipu top --once                          the same once, for scripts
  quipu top --json | jq '.[].queue_pairs'
  quipu top --listen 127.0.0.1:9400         for Prometheus

An engine is a process that has opened a device. Processes under `quipu sockets` are in a table of
their own. The command shows only your own processes on this machine (or in this container). Keys: q quits; up and down scroll through long lists.";

/// Shows it.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    if options.prometheus {
        print!("{}", page());
    } else if options.json {
        println!("{}", all());
    } else if options.once {
        print!("{}", once(Duration::from_secs(options.interval.into())).text());
    } else if let Some(address) = options.listen {
        listen::serve(address)?;
    } else {
        return watch(Duration::from_secs(options.interval.into())).map_err(|error| {
            Failure::new("cannot use the terminal", error, "use --once, --json or --prometheus")
        });
    }
    Ok(ExitCode::SUCCESS)
}

/// Everything, for scripts: engines, then processes with extended sockets.
fn all() -> Value {
    let mut all = model::json(&samples());
    if let Value::Array(list) = &mut all {
        list.extend(extended::json(&extended::processes()));
    }
    all
}

/// Everything, for Prometheus.
fn page() -> String {
    let extended = extended::page(&extended::processes());
    prometheus(&samples()) + &sockets::page(&processes()) + &extended
}

/// What happens within an interval; at once if there is nobody.
fn once(interval: Duration) -> Model {
    let (before, looked) = (samples(), epoch_ns());
    if before.is_empty() {
        return Model::new(before, &[], looked).with_sockets(&processes());
    }
    std::thread::sleep(interval);
    Model::new(samples(), &before, looked).with_sockets(&processes())
}

/// Fills the terminal until the user has seen enough, or a signal ends it. The terminal is then as it was.
fn watch(interval: Duration) -> io::Result<ExitCode> {
    if !io::stdout().is_terminal() {
        return Err(io::Error::other("standard output is not a terminal"));
    }
    let interrupts = Interrupts::block_with_hangup()?;
    let outcome = ratatui::try_init().and_then(|terminal| show(terminal, interval, &interrupts));
    ratatui::restore();
    outcome
}

fn show(
    mut terminal: DefaultTerminal,
    interval: Duration,
    interrupts: &Interrupts,
) -> io::Result<ExitCode> {
    let first = Model::new(samples(), &[], 0).with_sockets(&processes());
    let (mut model, mut looked) = (first, epoch_ns());
    let (mut next, mut scroll) = (Instant::now() + interval, 0);
    loop {
        let mut end = 0;
        terminal.draw(|frame| end = screen::draw(frame, &model, scroll))?;
        scroll = scroll.min(end);
        loop {
            if let Some(signal) = interrupts.pending() {
                return Ok(ExitCode::from(128_u8.saturating_add(signal as u8)));
            }
            let patience = next.saturating_duration_since(Instant::now());
            if event::poll(patience.min(LATENCY))? || patience.is_zero() {
                break;
            }
        }
        if Instant::now() >= next {
            model = Model::new(samples(), &model.samples, looked).with_sockets(&processes());
            (next, looked) = (Instant::now() + interval, epoch_ns());
            continue;
        }
        match key(&event::read()?) {
            Some(Key::Quit) => return Ok(ExitCode::SUCCESS),
            Some(Key::Up) => scroll = scroll.saturating_sub(1),
            Some(Key::Down) => scroll = (scroll + 1).min(end),
            None => {}
        }
    }
}

/// A key that means something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Quit,
    Up,
    Down,
}

fn key(event: &Event) -> Option<Key> {
    let Event::Key(key) = event else { return None };
    if key.kind == KeyEventKind::Release {
        return None;
    }
    match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Some(Key::Quit),
        KeyCode::Char('q') | KeyCode::Esc => Some(Key::Quit),
        KeyCode::Up | KeyCode::Char('k') => Some(Key::Up),
        KeyCode::Down | KeyCode::Char('j') => Some(Key::Down),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use ratatui::crossterm::event::KeyEvent;

    use super::*;

    #[test]
    fn keys_do_what_they_say() {
        let press = |code, modifiers| key(&Event::Key(KeyEvent::new(code, modifiers)));
        assert_eq!(press(KeyCode::Char('q'), KeyModifiers::NONE), Some(Key::Quit));
        assert_eq!(press(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Key::Quit));
        assert_eq!(press(KeyCode::Char('c'), KeyModifiers::NONE), None);
        assert_eq!(press(KeyCode::Down, KeyModifiers::NONE), Some(Key::Down));
    }
}
