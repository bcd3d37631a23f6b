//! Runs that are guided by coverage: an input that reaches something new is kept, and changed further.

use std::collections::BTreeSet;
use std::ffi::{OsStr, c_int};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use super::random::{MAX_LEN, Random};
use super::record::{Guard, complain};
use super::{corpus, coverage};

/// Between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(30);
/// Inputs by chance, before any is changed because of what it has reached.
const FIRST: u64 = 1000;
/// No feature has an input yet.
const NONE: u32 = u32::MAX;

/// What a campaign is asked to do.
pub(crate) struct Campaign<'a> {
    pub(crate) seed: u64,
    pub(crate) runs: u64,
    /// Ends it earlier; 0: does not.
    pub(crate) seconds: u64,
    pub(crate) artifacts: &'a Path,
    /// The inputs to begin with, and where those are written that reach something of their own. Next to it,
    /// with the ending `small`, fewer of them are written, which reach all that was reached.
    pub(crate) corpus: &'a Path,
}

/// Inputs that reached something new.
struct Pool {
    inputs: Vec<Vec<u8>>,
    /// Features of each input that no shorter one has.
    own: Vec<u32>,
    /// The shortest input of each feature.
    shortest: Vec<u32>,
    reached: usize,
}

impl Pool {
    fn new() -> Self {
        let shortest = vec![NONE; coverage::most_features()];
        Self { inputs: Vec::new(), own: Vec::new(), shortest, reached: 0 }
    }

    /// Keeps `input`, of which the features have just been counted, if it has some that are new, or that only
    /// longer inputs have.
    fn take(&mut self, input: &[u8]) -> bool {
        let index = self.inputs.len() as u32;
        let mut own = 0;
        let (shortest, inputs) = (&mut self.shortest, &self.inputs);
        let (reached, owners) = (&mut self.reached, &mut self.own);
        coverage::features(|feature| {
            let Some(holder) = shortest.get_mut(feature) else { return };
            if *holder == NONE {
                *reached += 1;
            } else if inputs[*holder as usize].len() <= input.len() {
                return;
            } else {
                owners[*holder as usize] -= 1;
            }
            *holder = index;
            own += 1;
        });
        if own == 0 {
            return false;
        }
        self.inputs.push(input.to_vec());
        self.own.push(own);
        true
    }

    /// The inputs that have something of their own.
    fn kept(&self) -> Vec<&[u8]> {
        let all = self.inputs.iter().zip(&self.own);
        all.filter(|(_, own)| **own > 0).map(|(input, _)| &input[..]).collect()
    }

    /// Inputs that take every edge which any has taken, however often.
    fn fewest(&self) -> Vec<&[u8]> {
        let edges = self.shortest.chunks(coverage::CLASSES);
        let holders = edges.filter_map(|classes| {
            let holders = classes.iter().filter(|&&holder| holder != NONE);
            holders.min_by_key(|&&holder| (self.inputs[holder as usize].len(), holder)).copied()
        });
        let holders: BTreeSet<u32> = holders.collect();
        holders.into_iter().map(|holder| &self.inputs[holder as usize][..]).collect()
    }

    /// An input to be changed: often one of the last that were found.
    fn draw(&self, random: &mut Random) -> usize {
        let count = self.inputs.len();
        for _ in 0..8 {
            let index = match random.below(2) {
                0 => random.below(count),
                _ => count - 1 - random.below(count.div_ceil(8)),
            };
            if self.own[index] > 0 {
                return index;
            }
        }
        random.below(count)
    }
}

/// Runs a campaign; the exit code.
pub(crate) fn run(target: fn(&[u8]), campaign: &Campaign<'_>) -> c_int {
    if !coverage::is_there() {
        eprintln!("the target is not instrumented: build it by `cargo xtask fuzz --guided`");
        return 2;
    }
    let begun = Instant::now();
    let mut guard = match Guard::new(campaign.artifacts, campaign.seed) {
        Ok(guard) => guard,
        Err(error) => return complain("the folder of artifacts", &error),
    };
    let mut known = match campaign.corpus.exists().then(|| corpus::read(campaign.corpus)) {
        Some(Ok(known)) => known,
        Some(Err(error)) => return complain("the corpus", &error),
        None => Vec::new(),
    };
    known.push(Vec::new());
    let (mut random, mut pool) = (Random(campaign.seed), Pool::new());
    let (mut spoken, mut last, mut done) = (Instant::now(), 0, 0);
    let name = campaign.corpus.file_name().unwrap_or_default();
    for run in 0..campaign.runs.max(known.len() as u64) {
        let input = match known.get(run as usize) {
            Some(input) => input.clone(),
            // By chance at first, and now and then: long inputs reach what short ones do not.
            None if run < FIRST || random.below(16) == 0 => random.input(&pool.inputs),
            None => {
                let parent = pool.draw(&mut random);
                change(&mut random, &pool.inputs[parent], &pool.inputs)
            }
        };
        if let Err(error) = guard.begin(run, &input) {
            return complain("the current input", &error);
        }
        coverage::reset();
        if catch_unwind(AssertUnwindSafe(|| target(&input))).is_err() {
            guard.keep("panic", &input);
            return 1;
        }
        pool.take(&input);
        done = run + 1;
        if spoken.elapsed() >= PROGRESS {
            report(name, &pool, done, (done - last, spoken.elapsed()));
            (spoken, last) = (Instant::now(), done);
            // What is interrupted goes on from here.
            if let Err(error) = write(&pool, campaign.corpus) {
                return complain("the corpus", &error);
            }
        }
        let over = campaign.seconds > 0 && begun.elapsed().as_secs() >= campaign.seconds;
        if over && done >= known.len() as u64 {
            break;
        }
    }
    report(name, &pool, done, (done, begun.elapsed()));
    match write(&pool, campaign.corpus) {
        Ok(()) => 0,
        Err(error) => complain("the corpus", &error),
    }
}

fn write(pool: &Pool, corpus: &Path) -> io::Result<()> {
    corpus::write(corpus, &pool.kept())?;
    corpus::write(&corpus.with_extension("small"), &pool.fewest())
}

/// A changed input: as [`Random::vary`] does it, or with a constant in it that the target has compared to
/// something, or with a number a little off.
fn change(random: &mut Random, input: &[u8], pool: &[Vec<u8>]) -> Vec<u8> {
    let mut input = input.to_vec();
    for _ in 0..1 << random.below(4) {
        match random.below(4) {
            0 => put_constant(random, &mut input),
            1 => shift_number(random, &mut input),
            _ => random.vary(&mut input, pool),
        }
    }
    input.truncate(MAX_LEN);
    input
}

fn put_constant(random: &mut Random, input: &mut Vec<u8>) {
    let constant = coverage::constant(random.next() as usize);
    let width = match constant {
        0..=0xff => 1 << random.below(3),
        0x100..=0xffff => 2,
        0x1_0000..=0xffff_ffff => 4,
        _ => 8,
    };
    let (little, big) = (constant.to_le_bytes(), constant.to_be_bytes());
    let octets = if random.below(2) == 0 { &little[..width] } else { &big[8 - width..] };
    let at = random.below(input.len() + 1);
    if random.below(3) == 0 {
        input.splice(at..at, octets.iter().copied());
    } else {
        let end = (at + width).min(input.len());
        input.splice(at..end, octets.iter().copied());
    }
}

fn shift_number(random: &mut Random, input: &mut [u8]) {
    let width = 1 << random.below(3);
    let Some(room) = input.len().checked_sub(width) else { return };
    let at = random.below(room + 1);
    let by = random.below(33) as u64;
    let octets = &mut input[at..at + width];
    if random.below(2) == 0 {
        octets.reverse();
    }
    let value = octets.iter().rev().fold(0u64, |value, &octet| value << 8 | u64::from(octet));
    let value = value.wrapping_add(by).wrapping_sub(16);
    octets.iter_mut().zip(value.to_le_bytes()).for_each(|(to, from)| *to = from);
    if random.below(2) == 0 {
        octets.reverse();
    }
}

fn report(name: &OsStr, pool: &Pool, done: u64, (since, took): (u64, Duration)) {
    let (features, kept) = (pool.reached, pool.kept());
    let octets = kept.iter().map(|input| input.len()).sum::<usize>();
    let rate = since as f64 / took.as_secs_f64().max(0.001);
    println!(
        "{}: {done} inputs, {rate:.0} a second, {features} features; {} inputs of {octets} octets kept",
        name.display(),
        kept.len()
    );
}
