//! Connections by rdma_cm: rdma-core's `cmtime`, unmodified, over Quipu. It takes so many connections
//! through one step after the other, all of them at once in each.

use anyhow::{Context, Result, ensure};

use super::{Through, server_and_client};
use crate::contender::{Contender, Round};
use crate::model::{Kind, Path, Role, Sample, Test};
use crate::sys;

struct Cmtime {
    through: Through,
    path: Path,
}

pub(super) fn find() -> Result<Vec<Box<dyn Contender>>> {
    sys::find_program(PROGRAM).context("there is no cmtime; Debian has it in rdmacm-utils")?;
    let through = Through::find()?;
    let make = |path| Box::new(Cmtime { through: through.clone(), path }) as Box<dyn Contender>;
    Ok(vec![make(Path::SameHost), make(Path::Tcp)])
}

const PROGRAM: &str = "cmtime";

/// How the table of steps begins: the columns after the name of a step are as below.
const HEAD: [&str; 10] = ["step", "total", "ms", "max", "ms", "min", "us", "us", "/", "conn"];

/// The steps in their order, each with microseconds per connection: the last number of "step : total ms,
/// max ms, min us, us / conn". Those before it run into each other if one is long.
fn steps(output: &str) -> Option<Vec<(String, f64)>> {
    let mut lines = output.lines().skip_while(|line| !line.split_whitespace().eq(HEAD));
    lines.next()?;
    let step = |line: &str| {
        let (name, numbers) = line.split_once(':')?;
        let us: f64 = numbers.split_whitespace().next_back()?.parse().ok()?;
        (us >= 0.0).then(|| (name.trim().to_owned(), us))
    };
    let steps: Vec<_> = lines.map_while(step).collect();
    let whole = ["connect", "disconnect"];
    whole.iter().all(|name| steps.iter().any(|(step, _)| step == name)).then_some(steps)
}

impl Cmtime {
    fn measure(&self, round: &Round, count: u64) -> Result<Sample> {
        let port = sys::free_port()?;
        let command = |to: &[&str]| {
            let mut command = self.through.command(self.path, PROGRAM);
            command.args(["-p", &port.to_string()]).args(to);
            command
        };
        let count_text = count.to_string();
        let mut server = command(&["-b", "127.0.0.1", "-c", &count_text]);
        let mut client = command(&["-s", "127.0.0.1", "-c", &count_text]);
        let output = server_and_client(&mut server, &mut client, port, round.cpus)
            .with_context(|| format!("{count} connections"))?;
        let also = steps(&output).context("cmtime printed no table of steps that is known")?;
        let us: f64 = also.iter().map(|(_, us)| us).sum();
        ensure!(us > 0.0, "cmtime took no time");
        Ok(Sample { size: count, ns: us * 1e3, also })
    }
}

impl Contender for Cmtime {
    fn name(&self) -> &str {
        match self.path {
            Path::SameHost => "Quipu, cmtime",
            _ => "Quipu tcp, cmtime",
        }
    }

    fn path(&self) -> Path {
        self.path
    }

    fn role(&self) -> Role {
        Role::Quipu
    }

    fn sizes(&self, test: Test, sizes: &[u64]) -> Vec<u64> {
        if test.kind == Kind::Connect { sizes.to_vec() } else { Vec::new() }
    }

    fn run(&mut self, round: &Round, _: Test, sizes: &[u64]) -> Result<Vec<Sample>> {
        sizes.iter().map(|&count| self.measure(round, count)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "creating id
disconnecting
destroying id
step              total ms     max ms     min us  us / conn
create id    :        1.11       0.07       0.00       1.11
resolve addr :      127.30      22.82    2210.00     127.29
resolve route:       44.58      43.67     941.00      44.58
create qp    :       13.76      10.81       1.00      13.76
connect      :      166.90      97.63     902.00     166.90
disconnect   :       74.77      26.55    2002.00      74.77
destroy      :        0.83       0.05       0.00       0.83
";

    #[test]
    fn reads_what_it_prints() {
        let steps = steps(OUTPUT).unwrap();
        let names: Vec<_> = steps.iter().map(|(name, _)| name.as_str()).collect();
        let expected = [
            "create id",
            "resolve addr",
            "resolve route",
            "create qp",
            "connect",
            "disconnect",
            "destroy",
        ];
        assert_eq!(names, expected);
        assert_eq!((steps[0].1, steps[1].1, steps[4].1), (1.11, 127.29, 166.90));
    }

    #[test]
    fn columns_may_run_into_each_other() {
        let line = "disconnect   :       0.00       0.001000000000.00       1.25\n";
        let text = format!("{}{line}", OUTPUT.split_once("disconnect   ").unwrap().0);
        assert_eq!(steps(&text).unwrap().last().unwrap().1, 1.25);
    }

    #[test]
    fn another_table_or_half_of_one_is_no_result() {
        let newer = OUTPUT.replace("total ms", "sum(us)");
        assert_eq!(steps(&newer), None);
        let half = OUTPUT.split_once("disconnect   ").unwrap().0;
        assert_eq!(steps(half), None);
        assert_eq!(steps(""), None);
    }
}
