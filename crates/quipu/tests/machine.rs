//! `quipu machine` as users run it: plans, sweeps, shards, errors. Each run takes well under a second.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A short run.
const SHORT: [&str; 4] = ["--set", "run.warmup=1ms", "--set", "run.sample=1ms"];
const SWEEP: [&str; 2] = ["--set", "l2.size=512KB,1MB,2MB"];

fn machine(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quipu"));
    command.arg("machine").args(arguments).stdin(Stdio::null());
    command.output().unwrap()
}

/// What a call that succeeds prints.
fn printed(arguments: &[&str]) -> String {
    let output = machine(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&printed(&[arguments, &["--json"]].concat())).unwrap()
}

/// What a call that fails says.
fn refused(arguments: &[&str]) -> String {
    let output = machine(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// A folder of one test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("quipu-machine-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn every_listed_plan_can_be_shown_and_what_is_shown_can_be_run() {
    let list = json(&["list"]);
    let names: Vec<&str> =
        list.as_array().unwrap().iter().map(|plan| plan["name"].as_str().unwrap()).collect();
    assert!(names.len() >= 3 && names.contains(&"sinic") && names.contains(&"qpip"), "{names:?}");
    let text = printed(&["list"]);
    let folder = Folder::new("show");
    for name in names {
        assert!(text.contains(name));
        let shown = printed(&["show", name]);
        assert!(shown.contains(&format!("name = \"{name}\"")), "{shown}");
        if name == "sinic" {
            let file = folder.write("plan.toml", &shown);
            let [of_name, of_file] =
                [name, &file].map(|plan| json(&[&["run", plan], &SHORT[..]].concat()));
            assert_eq!(of_name["results"], of_file["results"]);
        }
    }
}

#[test]
fn a_run_has_numbers_a_table_and_a_figure() {
    let folder = Folder::new("figure");
    let svg = folder.path("run.svg");
    let text = printed(&[&["run", "sinic", "--svg", &svg], &SHORT[..]].concat());
    assert!(text.contains("Gbit/s") && text.contains("stack"), "{text}");
    assert!(std::fs::read_to_string(Path::new(&svg)).unwrap().contains("</svg>"));
    let results = json(&[&["run", "sinic"], &SHORT[..]].concat());
    let report = &results["results"][0]["report"];
    let gbps = report["gbps"].as_f64().unwrap();
    assert!((9.0..10.5).contains(&gbps), "{gbps}");
    let cpu = report["cpu"].as_array().unwrap();
    let total: f64 = cpu.iter().map(|share| share["percent"].as_f64().unwrap()).sum();
    assert!((total - 100.0).abs() < 0.01, "{total} %");
}

#[test]
fn a_plan_and_a_seed_are_one_run() {
    let run = |seed: &str| {
        let lossy = ["--set", "link.loss_ppm=1000", "--set", "os.sack=true", "--set", seed];
        let results = json(&[&["run", "sinic", "--twice"], &SHORT[..], &lossy].concat());
        results["results"][0]["report"]["trace_hash"].as_str().unwrap().to_owned()
    };
    assert_eq!(run("seed=7"), run("seed=7"));
    assert_ne!(run("seed=7"), run("seed=8"));
}

#[test]
fn shards_that_are_merged_are_the_whole_sweep() {
    let folder = Folder::new("shards");
    let sweep = [&["run", "zero-copy"], &SHORT[..], &SWEEP].concat();
    let whole = json(&sweep);
    assert_eq!(whole["points"], 3);
    let labels: Vec<&str> = whole["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|point| point["label"].as_str().unwrap())
        .collect();
    assert!(labels[2].ends_with("l2.size=2MB"), "{labels:?}");
    let part = |number: usize| {
        let shard = format!("{number}/2");
        let text = printed(&[&sweep[..], &["--shard", &shard, "--json"]].concat());
        folder.write(&format!("part{number}.json"), &text)
    };
    let [first, second] = [part(1), part(2)];
    assert_eq!(json(&["merge", &second, &first]), whole);
    assert!(refused(&["merge", &first]).contains("not a whole sweep"));
    assert!(refused(&["merge", &first, &first]).contains("not a whole sweep"));
    let other = folder.write("other.json", "{}");
    assert!(refused(&["merge", &other]).contains("is not a part of a sweep"));
}

#[test]
fn a_plan_that_cannot_be_is_refused_with_its_line_and_what_may_stand_there() {
    let folder = Folder::new("bad");
    for (text, line, words) in [
        ("[nic]\nkind = \"sinic\"\nspeed = 3\n", 3, "expected one of `kind`"),
        ("[nic]\nattach = \"usb\"\n", 2, "expected one of `pcie`, `pci`, `memory`, `cache`"),
        ("[nic]\nattach = \"pcie\"\n[pcie]\ngeneration = 4\nlanes = 16\n", 5, "raise bridge.rate"),
        ("[[faults]]\nkind = \"stall\"\nat = \"1ms\"\nlength = \"soon\"\n", 4, "soon"),
        ("[link]\nmtu = 1500\nmtu = 1501\n", 3, "duplicate"),
    ] {
        let file = folder.write("plan.toml", text);
        let error = refused(&["run", &file]);
        assert!(error.contains(&format!("line {line}")), "{text}: {error}");
        assert!(error.contains(words), "{text}: {error}");
    }
    assert!(refused(&["run", "no-such-plan"]).contains("zero-copy"), "the names are listed");
    let error = refused(&["run", "sinic", "--set", "l2.ways=8,0"]);
    assert!(error.contains("l2.ways"), "{error}");
    let error = refused(&["run", "qpip", "--set", "link.loss_ppm=1000000"]);
    assert!(error.contains("the connection ended"), "{error}");
}

#[test]
fn faults_of_a_plan_happen_and_are_the_same_each_time() {
    let folder = Folder::new("faults");
    let fault = |kind: &str, more: &str| {
        let text = format!(
            "[nic]\nkind = \"sinic\"\nattach = \"cache\"\n[run]\nwarmup = \"1ms\"\nsample = \"3ms\"\n\
             [[faults]]\nkind = \"{kind}\"\nat = \"1500us\"\nlength = \"1ms\"\n{more}"
        );
        let file = folder.write(&format!("{kind}.toml"), &text);
        json(&["run", &file, "--twice"])["results"][0]["report"].clone()
    };
    let clean = fault("link-loss", "ppm = 0\n");
    let lossy = fault("link-loss", "ppm = 5000\n");
    assert!(clean["lost"] == 0 && lossy["lost"].as_u64().unwrap() > 0, "{lossy}");
    let rate = |report: &Value| report["rx_gbps"].as_f64().unwrap();
    for (kind, more) in [("stall", "core = 0\n"), ("lost-interrupts", "")] {
        let report = fault(kind, more);
        assert!(report["trace_hash"] != clean["trace_hash"], "{kind}");
        assert!(rate(&report) > 0.1, "{kind}: {report}");
    }
}

#[test]
fn a_packet_has_a_timeline() {
    let text = printed(&[&["run", "sinic", "--trace", "500"], &SHORT[..]].concat());
    let trace: Value = serde_json::from_str(&text).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    assert!(events.iter().any(|event| event["name"] == "stack"), "{text}");
    let arguments = [&["run", "sinic", "--trace", "99999999"], &SHORT[..]].concat();
    assert!(refused(&arguments).contains("was not seen"));
}
