//! `quipu paper`: the experiments of the papers that Quipu unites, published values next to ours.

mod ns3;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use quipu_paper::ladder::{self, Outcome, Rung, ladder};
use quipu_paper::report::{FigureResult, PaperResult, table, write};
use quipu_paper::{Environment, Experiment, Figure, Measured, Paper, compare};

use super::failure::Failure;
use super::output::make_folder;

/// What to do.
#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Options {
    /// A paper (`quipu paper list` names them), `list`, `check`, or `ladder`.
    #[arg(value_name = "PAPER|list|check|ladder")]
    what: String,
    /// With `check`: only these papers.
    #[arg(value_name = "PAPER")]
    papers: Vec<String>,
    /// Only this figure or table, such as 4 or table-1. May be given several times.
    #[arg(long, value_name = "FIGURE")]
    figure: Vec<String>,
    /// Write an HTML report, JSON and the pictures into this folder.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print JSON instead of tables, without progress.
    #[arg(long)]
    json: bool,
    /// Take fewer samples: much faster, with rough numbers.
    #[arg(long)]
    quick: bool,
}

const EXAMPLES: &str = "\
Examples:
  quipu paper list                          the papers, their figures, how long each takes
  quipu paper qpip --out report             all figures of a paper, as an HTML report
  quipu paper qpip --figure table-1 --json  one of its tables, for programs
  quipu paper check                         all papers; exit code 1 if a value misses its target
  quipu paper ladder                        only what is checked of the simulated hosts: V0 to V6

Each result shows the published value, ours, the ratio, and whether it is within tolerance. Facts
that a model was fitted to and facts that were held out are marked.";

/// Runs the command.
pub(crate) fn run(options: &Options) -> Result<ExitCode, Failure> {
    match options.what.as_str() {
        "list" => list(options.json),
        "check" => check(options),
        "ladder" => climb(options),
        name => {
            if let Some(extra) = options.papers.first() {
                let why = format!("\"{extra}\" follows the paper {name}");
                let remedy = "Give one paper, or `quipu paper check PAPER...`.";
                return Err(Failure::new("wrong arguments", why, remedy));
            }
            make_folder(options.out.as_deref())?;
            let (paper, result) = one(name, options)?;
            deliver(&[(paper, result)], options)
        }
    }
}

fn unknown(error: impl std::fmt::Display) -> Failure {
    Failure::new("no such experiment", error, "`quipu paper list` shows all of them.")
}

fn list(json: bool) -> Result<ExitCode, Failure> {
    let entries = quipu_paper::papers().map_err(unknown)?;
    if json {
        let papers: Vec<_> = entries.iter().map(|entry| &entry.paper).collect();
        println!("{}", serde_json::to_string_pretty(&papers).map_err(unknown)?);
        return Ok(ExitCode::SUCCESS);
    }
    for entry in &entries {
        println!("{:8} {}", entry.paper.id, entry.paper.title);
        for figure in &entry.paper.figures {
            let facts = entry.paper.facts_of(figure).count();
            let name = figure.name();
            println!(
                "         {name:10} {} ({facts} {}, about {} s)",
                figure.title,
                if facts == 1 { "fact" } else { "facts" },
                figure.seconds
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the experiments of a paper.
fn one(name: &str, options: &Options) -> Result<(Paper, PaperResult), Failure> {
    let entry = quipu_paper::find(name).map_err(unknown)?;
    let chosen: Vec<Figure> = if options.figure.is_empty() {
        entry.paper.figures.clone()
    } else {
        let find = |figure: &String| entry.paper.figure(figure).cloned().map_err(unknown);
        options.figure.iter().map(find).collect::<Result<_, _>>()?
    };
    let scratch = Scratch::new()?;
    let quiet = options.json;
    let mut experiment = (entry.experiment)();
    let mut result = PaperResult {
        paper: entry.paper.id.clone(),
        title: entry.paper.title.clone(),
        figures: Vec::new(),
    };
    for (index, figure) in chosen.iter().enumerate() {
        let step =
            format!("{} {} ({} of {})", entry.paper.id, figure.name(), index + 1, chosen.len());
        let mut progress = |text: &str| {
            if !quiet {
                eprintln!("{step}: {text}");
            }
        };
        let mut environment = Environment {
            quipu: std::env::current_exe()?,
            scratch: scratch.0.clone(),
            quick: options.quick,
            progress: &mut progress,
        };
        result.figures.push(measure(&entry.paper, figure, &mut *experiment, &mut environment));
    }
    Ok((entry.paper, result))
}

/// Runs one experiment. One that cannot run here does not keep the others from running.
fn measure(
    paper: &Paper,
    figure: &Figure,
    experiment: &mut dyn Experiment,
    environment: &mut Environment<'_>,
) -> FigureResult {
    let (measured, error) = match experiment.run(figure, environment) {
        Ok(measured) => (measured, None),
        Err(error) => (Measured::default(), Some(format!("{error:#}"))),
    };
    let facts =
        if error.is_some() { Vec::new() } else { compare(paper.facts_of(figure), &measured) };
    let Measured { charts, notes, .. } = measured;
    FigureResult { figure: figure.clone(), facts, notes, error, charts }
}

fn check(options: &Options) -> Result<ExitCode, Failure> {
    let names = if options.papers.is_empty() {
        let all = quipu_paper::papers().map_err(unknown)?;
        all.into_iter().map(|entry| entry.paper.id).collect()
    } else {
        options.papers.clone()
    };
    let results = names.iter().map(|name| one(name, options)).collect::<Result<Vec<_>, _>>()?;
    let all: Vec<_> = results.iter().map(|(_, result)| result).collect();
    let rungs = ladder(&all, &ns3::run());
    let failed = all.iter().any(|result| result.fails()) || has_failed(&rungs);
    if options.json {
        print_json(&serde_json::json!({ "papers": all, "ladder": rungs }))?;
    } else {
        all.iter().for_each(|result| print!("{}", table(result)));
        print!("\n{}", ladder::table(&rungs));
    }
    save(&results, options)?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The simulated figures only, and the ladder.
fn climb(options: &Options) -> Result<ExitCode, Failure> {
    if !options.papers.is_empty() || !options.figure.is_empty() || options.out.is_some() {
        let why = "`quipu paper ladder` runs all simulated figures";
        return Err(Failure::new("wrong arguments", why, "Give no paper, --figure or --out."));
    }
    let figures = |paper: &str| -> Result<Vec<String>, Failure> {
        let paper = quipu_paper::find(paper).map_err(unknown)?.paper;
        let all = paper.figures.into_iter().map(|figure| figure.id);
        Ok(all.filter(|id| paper.id != "qpip" || id.starts_with("model-")).collect())
    };
    let mut results = Vec::new();
    for name in ["qpip", "sinic"] {
        let options = Options {
            what: name.into(),
            papers: Vec::new(),
            figure: figures(name)?,
            out: None,
            json: options.json,
            quick: options.quick,
        };
        results.push(one(name, &options)?.1);
    }
    let rungs = ladder(&results.iter().collect::<Vec<_>>(), &ns3::run());
    if options.json {
        print_json(&rungs)?;
    } else {
        print!("{}", ladder::table(&rungs));
    }
    Ok(if has_failed(&rungs) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn has_failed(rungs: &[Rung]) -> bool {
    rungs.iter().any(|rung| rung.outcome == Outcome::Failed)
}

fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    println!("{}", serde_json::to_string_pretty(value).map_err(unknown)?);
    Ok(())
}

/// Prints the results of one paper, and writes them into the folder that was asked for.
fn deliver(results: &[(Paper, PaperResult)], options: &Options) -> Result<ExitCode, Failure> {
    for (_, result) in results {
        if options.json {
            print_json(result)?;
        } else {
            print!("{}", table(result));
        }
    }
    save(results, options)?;
    let unable = |result: &PaperResult| result.figures.iter().all(|figure| figure.error.is_some());
    let failed = results.iter().any(|(_, result)| unable(result));
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Writes results into the folder that was asked for.
fn save(results: &[(Paper, PaperResult)], options: &Options) -> Result<(), Failure> {
    if let Some(folder) = &options.out {
        for (paper, result) in results {
            write(folder, paper, result).map_err(|error| {
                Failure::new(
                    "cannot write the report",
                    format!("{error:#}"),
                    "give --out a folder that you may write to",
                )
            })?;
            report_place(folder, paper, options.json);
        }
    }
    Ok(())
}

fn report_place(folder: &Path, paper: &Paper, quiet: bool) {
    if !quiet {
        eprintln!("report: {}", folder.join(format!("{}.html", paper.id)).display());
    }
}

/// A folder of this process's own for temporary files, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, Failure> {
        let folder = std::env::temp_dir().join(format!("quipu-paper-{}", std::process::id()));
        std::fs::create_dir(&folder).map_err(|error| {
            let why = format!("{}: {error}", folder.display());
            Failure::new(
                "cannot make a temporary folder",
                why,
                "Set TMPDIR to a folder that you may write to.",
            )
        })?;
        Ok(Self(folder))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use quipu_paper::report::page;

    use super::*;

    struct Half;

    impl Experiment for Half {
        fn run(
            &mut self,
            figure: &Figure,
            _: &mut Environment<'_>,
        ) -> Result<Measured, quipu_paper::experiment::Error> {
            if figure.id == "table-1" {
                return Err(quipu_paper::experiment::Error::msg("no network here"));
            }
            let mut measured = Measured::default();
            measured.set("rtt-udp-to-kernel", 0.5);
            Ok(measured)
        }
    }

    #[test]
    fn an_experiment_that_cannot_run_is_reported_and_the_others_go_on() {
        let entry = quipu_paper::find("qpip").unwrap();
        let mut environment = Environment {
            quipu: PathBuf::new(),
            scratch: PathBuf::new(),
            quick: true,
            progress: &mut |_| {},
        };
        let figures: Vec<_> = ["table-1", "3"]
            .map(|name| {
                let figure = entry.paper.figure(name).unwrap();
                measure(&entry.paper, figure, &mut Half, &mut environment)
            })
            .into();
        assert_eq!(figures[0].error.as_deref(), Some("no network here"));
        assert!(figures[1].error.is_none());
        let (paper, title) = (entry.paper.id.clone(), entry.paper.title.clone());
        let result = PaperResult { paper, title, figures };
        assert!(result.fails());
        let text = table(&result);
        assert!(text.contains("could not run: no network here"), "{text}");
        assert!(text.contains("NOT MEASURED") && text.contains("met"), "{text}");
        let html = page(&entry.paper, &result);
        assert!(html.contains("no network here") && html.ends_with("</html>\n"));
    }
}
