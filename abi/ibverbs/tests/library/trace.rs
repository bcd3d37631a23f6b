//! The trace of calls (`QUIPU_TRACE`), of a C program over this library and the real engine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;

use crate::harness::{compiled, over_engine, printed};

/// The program; none without a C compiler. It is compiled once: it cannot be written while it runs.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    PROGRAM.get_or_init(|| compiled("trace")).as_deref()
}

/// Runs one test of the program with its calls traced in a file of that name; the file.
fn traced(program: &Path, test: &str, name: &str) -> String {
    let file = over_engine().path().join(name);
    let mut command = Command::new(program);
    over_engine().put_in_front(&mut command);
    command.arg(test).env("QUIPU_TRACE", &file).env("QUIPU_ADDRESS", "127.0.0.1");
    printed(command.output().expect("the program starts"));
    fs::read_to_string(file).unwrap()
}

/// The calls of one test, as JSON.
fn calls(program: &Path, test: &str) -> Vec<Value> {
    let text = traced(program, test, &format!("{test}.jsonl"));
    text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

/// The calls of one function.
fn of<'a>(calls: &'a [Value], function: &str) -> Vec<&'a Value> {
    calls.iter().filter(|call| call["call"] == function).collect()
}

#[test]
fn work_requests_and_completions_are_shown() {
    let Some(program) = program() else { return };
    let calls = calls(program, "posted_and_polled");
    let posted = of(&calls, "ibv_post_send");
    assert_eq!(posted.len(), 2);
    let list = posted[0]["args"]["wr"].as_array().unwrap();
    assert_eq!(
        (&list[0]["opcode"], &list[0]["wr_id"]),
        (&"IBV_WR_RDMA_WRITE".into(), &"0x11".into())
    );
    assert_eq!(
        (&list[1]["opcode"], &list[1]["imm_data"]),
        (&"IBV_WR_SEND_WITH_IMM".into(), &"0x2a".into())
    );
    assert_eq!(list[1]["sg_list"][0]["length"], 64);
    assert_eq!(posted[0]["result"], 0);
    let polled: Vec<&Value> = of(&calls, "ibv_poll_cq");
    let found = polled.iter().filter(|call| call["result"] == 1);
    let found: Vec<&Value> = found.map(|call| &call["args"]["wc"][0]).collect();
    let ids: Vec<_> = found.iter().map(|wc| wc["wr_id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["0x11", "0x12", "0x21", "0x11"]);
    assert_eq!(found[2]["opcode"], "IBV_WC_RECV");
    assert_eq!((&found[2]["byte_len"], &found[2]["imm_data"]), (&64.into(), &"0x2a".into()));
    assert_eq!(found[3]["status"], "IBV_WC_REM_ACCESS_ERR");
    // What found nothing is few lines, of which one stands for many calls.
    let times = |call: &&&Value| call["times"].as_u64().unwrap_or(1);
    let empty: u64 =
        polled.iter().filter(|call| call["result"] == 0).map(|call| times(&call)).sum();
    assert!(empty >= 1000 && polled.len() < 100, "{empty} in {}", polled.len());
    // A state's attributes are those that the mask names.
    let modified = of(&calls, "ibv_modify_qp");
    let first = &modified[0]["args"];
    assert_eq!(first["attr"]["qp_state"], "IBV_QPS_INIT");
    assert!(first["attr"].get("dest_qp_num").is_none());
    assert!(first["attr_mask"].as_str().unwrap().contains("IBV_QP_PKEY_INDEX"));
    // A queue pair is told by its number, and one call follows another.
    let made = &of(&calls, "ibv_create_qp")[0]["result"];
    assert_eq!(made["address"], posted[0]["args"]["qp"]);
    assert_eq!(made["qp_num"], found[0]["qp_num"]);
    let pid = calls[0]["pid"].as_u64().unwrap();
    assert!(calls.iter().all(|call| call["pid"] == pid && call["tid"] == pid));
    assert!(calls.iter().all(|call| call["duration_ns"].is_u64()));
}

#[test]
fn errors_are_shown_as_programs_see_them() {
    let Some(program) = program() else { return };
    let text = traced(program, "failures", "failures.txt");
    let line = |part: &str| {
        let line = text.lines().find(|line| line.contains(part));
        line.unwrap_or_else(|| panic!("{part} is not in {text}"))
    };
    // What is only there to be linked has no name of its own.
    assert!(!text.contains("nothing("), "{text}");
    let refused = line("access=IBV_ACCESS_REMOTE_WRITE)");
    assert!(refused.contains(" ibv_reg_mr") && refused.contains(" = NULL EINVAL <"), "{refused}");
    assert!(line(" = 16 EBUSY <").contains("ibv_dealloc_pd(pd=0x"));
    let port = line("ibv_query_port(");
    assert!(port.contains("port_num=2") && port.contains(" = 22 EINVAL <"), "{port}");
    assert!(line("access=IBV_ACCESS_LOCAL_WRITE)").contains(" = {address=0x"), "{text}");
    let words: Vec<_> = line("ibv_open_device(").split(' ').collect();
    assert!(words[0].parse::<f64>().is_ok_and(|time| time > 1e9), "{words:?}");
    assert!(words[1].parse::<u32>().is_ok(), "{words:?}");
}

#[test]
fn what_a_refused_call_has_not_filled_is_not_followed() {
    let Some(program) = program() else { return };
    let calls = calls(program, "refused");
    let posted = of(&calls, "ibv_post_recv");
    assert_eq!(posted[0]["args"]["bad_wr"][0][0]["wr_id"], "0x32");
    assert!(posted[1]["args"]["wr"][0]["sg_list"].is_string(), "{}", posted[1]);
    let table = of(&calls, "ibv_query_gid_table")[0];
    assert!(table["args"]["out"].is_string() && table["errno"] == "EINVAL", "{table}");
}

#[test]
fn calls_of_the_extended_interface_are_shown_one_by_one() {
    let Some(program) = program() else { return };
    let calls = calls(program, "step_by_step");
    let begun: Vec<&str> = calls.iter().filter_map(|call| call["call"].as_str()).collect();
    let builds = ["ibv_wr_start", "ibv_wr_send", "ibv_wr_set_sge", "ibv_wr_complete"];
    assert!(begun.windows(4).any(|four| four == builds), "{begun:?}");
    let send = &of(&calls, "ibv_wr_send")[0]["args"]["qp"];
    assert_eq!((&send["wr_id"], &send["wr_flags"]), (&"0x77".into(), &"IBV_SEND_SIGNALED".into()));
    let started = of(&calls, "ibv_start_poll");
    let found = &started.last().unwrap()["args"]["cq_ex"];
    assert_eq!(
        (&found["wr_id"], &found["status"]),
        (&"0x77".into(), &"IBV_WC_WR_FLUSH_ERR".into())
    );
}

/// What is written beside a program is cut short, not the program.
#[test]
fn a_limit_of_file_sizes_ends_no_program() {
    let Some(program) = program() else { return };
    let (trace, pcap) =
        ["limit.txt", "limit.pcapng"].map(|name| over_engine().path().join(name)).into();
    for blocks in ["0", "4"] {
        for file in [&trace, &pcap] {
            let _ = fs::remove_file(file);
        }
        let mut shell = Command::new("sh");
        shell
            .args(["-c", "ulimit -f $1 && exec \"$0\" posted_and_polled"])
            .arg(program)
            .arg(blocks);
        over_engine().put_in_front(&mut shell);
        shell.env("QUIPU_TRACE", &trace).env("QUIPU_PCAP", &pcap).env("QUIPU_ADDRESS", "127.0.0.1");
        let output = shell.output().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(complaint.contains("no more packets are captured"), "{complaint}");
        printed(output);
        let lengths = [&trace, &pcap].map(|file| fs::metadata(file).unwrap().len());
        assert!(lengths.iter().all(|length| *length <= 4096), "{lengths:?}");
        assert!(blocks == "0" || lengths.iter().all(|length| *length > 0), "{lengths:?}");
    }
}

#[test]
fn nothing_is_traced_that_nobody_asked_for() {
    let Some(program) = program() else { return };
    let output = over_engine().run(program, &["failures"]);
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    printed(output);
}
