//! Runs a plan from a file: `cargo run -p quipu-machine --example run_plan -- FILE l2.size=1MB`.
//!
//! `quipu machine run` does the same with more options.

use std::error::Error;
use std::time::Instant;

use quipu_machine::{Plan, Setting, breakdown, run, table};

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let file = words.next().ok_or("give a plan file")?;
    let settings: Vec<Setting> = words
        .filter_map(|word| {
            let (key, value) = word.split_once('=')?;
            Some(Setting { key: key.into(), value: value.into() })
        })
        .collect();
    let plan = Plan::parse_with(&std::fs::read_to_string(&file)?, &settings)?;
    let begun = Instant::now();
    let report = run(&plan)?;
    let took = begun.elapsed();
    print!("{}{}", table(&[(plan.name.clone(), report.clone())]), breakdown(&report));
    println!("  {:.3} s", took.as_secs_f64());
    Ok(())
}
