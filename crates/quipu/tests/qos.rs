//! `quipu qos bench`: the processes of this machine share a port as its tables say. Tolerances are for a
//! machine on which other tests run.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

#[path = "../../../abi/types/testing/cdylib.rs"]
mod cdylib;

/// Each measurement has the machine for itself, as far as these tests go.
static MACHINE: Mutex<()> = Mutex::new(());

/// Streams in three lanes. IPoIB needs namespaces, and is left out without them.
#[test]
fn streams_share_a_port_as_its_tables_say() {
    // The tests run before the libraries are staged.
    let library = cdylib::built(&["-p", "quipu-sdp-preload"], "quipu_sdp_preload");
    let _alone = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let output = Command::new("timeout")
        .args(["300", env!("CARGO_BIN_EXE_quipu"), "qos", "streams", "--quick", "--json"])
        .args(["--rate", "50Mbps"])
        .env("QUIPU_LIB_DIR", library.parent().unwrap())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let skipped: Vec<_> =
        report["skipped"].as_array().unwrap().iter().map(|it| &it["kind"]).collect();
    if !skipped.is_empty() {
        println!("SKIPPED: {}", report["skipped"]);
    }
    let shares = report["shares"].as_array().unwrap();
    // What a lane of few packets has sent in 0.35 seconds says little.
    for share in shares.iter().filter(|it| it["value"].as_u64().is_some_and(|it| it <= 4)) {
        let of = |key: &str| share[key].as_f64().unwrap_or(f64::NAN);
        if share["rule"] == "alone" {
            assert!(of("first_mbps") > 0.0, "{share}");
            continue;
        }
        let ratio = of("first_mbps") / of("other_mbps") / of("expected");
        assert!((0.5..=2.0).contains(&ratio), "{share}");
    }
    let has = |kind: &str| shares.iter().any(|share| share["first"] == *kind);
    assert!(has("bulk") && has("sdp"), "{}: {errors}", report["skipped"]);
    assert_ne!(has("ipoib"), skipped.iter().any(|it| **it == "ipoib"), "{errors}");
}

/// What the bench measures, in a network of its own: no other test sends by that port.
fn bench() -> Option<serde_json::Value> {
    let may = Command::new("unshare").args(["-rn", "ip", "link", "show", "lo"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: no network namespace is allowed here");
        return None;
    }
    let address = format!("10.77.{}.1", std::process::id() % 250);
    let plot = std::env::temp_dir().join(format!("quipu-qos-{}.svg", std::process::id()));
    let script = format!(
        "ip link set lo up; ip address add {address}/32 dev lo; \
         exec timeout 120 {} qos bench --quick --rate 100Mbps --address {address} --json --plot {}",
        env!("CARGO_BIN_EXE_quipu"),
        plot.display()
    );
    let output = Command::new("unshare")
        .args(["-rn", "sh", "-c", &script])
        .env_remove("QUIPU_ADDRESS")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let svg = std::fs::read_to_string(Path::new(&plot)).unwrap();
    assert!(svg.starts_with("<svg") || svg.starts_with("<?xml"), "{svg}");
    std::fs::remove_file(&plot).unwrap();
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn processes_share_a_port_as_its_tables_say() {
    let _alone = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(report) = bench() else { return };
    let shares = report["shares"].as_array().unwrap();
    assert_eq!(shares.len(), 7);
    for share in shares {
        let ratio = share["ratio"].as_f64().unwrap() / share["expected"].as_f64().unwrap();
        assert!((0.75..=1.25).contains(&ratio), "{share}");
        let of_rate = share["of_rate"].as_f64().unwrap();
        assert!((0.25..=1.1).contains(&of_rate), "{share}");
    }
    let p50 = |index: usize| report["pings"][index]["p50_us"].as_f64().unwrap();
    // A packet of bulk data takes 330 us at this rate. Waits for a processor are longer than any for a lane.
    let (idle, one_lane, high_lane) = (p50(0), p50(1), p50(2));
    assert!(idle > 0.0 && high_lane < one_lane + 1000.0, "{report:#}");
}
