//! `quipu bench`: what Quipu does in numbers. The work is in the crate `quipu-bench`.

use std::process::ExitCode;

use super::failure::Failure;

/// Runs the benchmark.
pub(crate) fn run(options: &quipu_bench::Options) -> Result<ExitCode, Failure> {
    if options.nbd {
        return super::nbd::bench(options.quick, options.json);
    }
    if options.am {
        return super::am::rows(options.quick, options.json);
    }
    if options.sockets {
        return super::sockets::bench(options);
    }
    let outcome = quipu_bench::run(options, |text| print!("{text}"));
    outcome.map_err(|error| Failure::new("the benchmark failed", format!("{error:#}"), ""))?;
    Ok(ExitCode::SUCCESS)
}
