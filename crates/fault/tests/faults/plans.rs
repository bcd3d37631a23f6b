//! Plans: what is understood, and what is refused with which words.

use quipu_fault::*;
use quipu_nic::{QpState, WcStatus};

fn parse(text: &str) -> Result<Plan, PlanError> {
    Plan::parse(text, "plan.toml")
}

fn fault(body: &str) -> Fault {
    let plan = parse(&format!("[[fault]]\n{body}\n")).unwrap_or_else(|error| panic!("{error}"));
    plan.faults.into_iter().next().unwrap()
}

#[test]
fn a_plan_says_what_where_and_when() {
    let plan = parse(
        r#"
        seed = 42
        [[fault]]
        name = "the third large write of rank 1"
        inject = "completion"
        status = "IBV_WC_REM_ACCESS_ERR"
        opcode = ["rdma_write", "rdma_write_with_imm"]
        bytes = "4K.."
        qp = [1, 2]
        program = "a.out"
        env = { RANK = "1" }
        nth = 3
        "#,
    )
    .unwrap();
    assert_eq!((plan.seed, plan.faults.len()), (42, 1));
    let fault = &plan.faults[0];
    assert_eq!(fault.name.as_deref(), Some("the third large write of rank 1"));
    assert_eq!(fault.inject, Inject::Completion(WcStatus::RemAccessErr));
    assert_eq!(fault.trigger, Trigger::Calls(vec![Call::PostSend]));
    assert_eq!(fault.filter.opcodes, [Opcode::Write, Opcode::WriteImm]);
    assert_eq!(fault.filter.bytes, Some(4096..=u64::MAX));
    assert_eq!(fault.filter.qps, [1, 2]);
    assert_eq!((fault.schedule.nth, fault.schedule.count), (3, 1));
    let rank = |rank: &'static str| move |name: &str| (name == "RANK").then(|| rank.to_owned());
    let admits = |program, rank: &dyn Fn(&str) -> Option<String>| {
        fault.process.admits(&Process { program, env: rank })
    };
    assert!(admits("a.out", &rank("1")));
    assert!(!admits("a.out", &rank("0")));
    assert!(!admits("mpirun", &rank("1")));
    assert!(!admits("a.out", &|_| None));
}

#[test]
fn every_kind_of_fault_is_understood() {
    let ms = 1_000_000;
    let delay = fault("inject = \"delay\"\ntime = \"5ms\"\njitter = \"1ms\"\nside = \"recv\"");
    assert_eq!(delay.inject, Inject::Delay { time: 5 * ms, jitter: ms });
    assert_eq!(delay.trigger, Trigger::Calls(vec![Call::PostRecv, Call::PostSrqRecv]));
    assert_eq!(delay.schedule.count, u64::MAX);
    let slow = fault("inject = \"slow_peer\"\ntime = \"5ms\"");
    assert_eq!(slow.inject, Inject::SlowPeer { time: 5 * ms, jitter: 0 });
    let rnr = fault("inject = \"rnr\"\ntimes = 3\ntime = \"2ms\"");
    assert_eq!(rnr.inject, Inject::Rnr { times: 3, time: 2 * ms });
    let held = fault("inject = \"rnr\"\nside = \"recv\"");
    assert_eq!(held.trigger, Trigger::Calls(vec![Call::PostRecv, Call::PostSrqRecv]));
    let dead = fault("inject = \"dead_peer\"\nafter = \"1s\"\nqp = 2");
    assert_eq!(dead.trigger, Trigger::Clock(1000 * ms, None));
    let dead = fault("inject = \"dead_peer\"\nnth = 100");
    assert_eq!((dead.trigger, dead.schedule.nth), (Trigger::Calls(vec![Call::PostSend]), 100));
    let flapping = fault("inject = \"port_down\"\ntime = \"1s\"\nafter = \"1s\"\nevery = \"10s\"");
    assert_eq!(flapping.inject, Inject::PortDown { time: Some(1000 * ms) });
    assert_eq!(flapping.trigger, Trigger::Clock(1000 * ms, Some(10_000 * ms)));
    let removal = fault("inject = \"device_removal\"\ncall = \"create_qp\"\nnth = 2");
    assert_eq!(removal.trigger, Trigger::Calls(vec![Call::CreateQp]));
    let refusal =
        fault("inject = \"refuse\"\ncall = \"modify_qp\"\nstate = \"rtr\"\nerrno = \"EIO\"");
    assert_eq!(refusal.inject, Inject::Refuse(Errno::EIO));
    assert_eq!(refusal.filter.state, Some(QpState::Rtr));
    for &event in EventKind::ALL {
        let body = format!("inject = \"event\"\nevent = \"{}\"\nafter = \"1s\"", event.name());
        assert_eq!(fault(&body).inject, Inject::Event(event));
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_its_line_and_what_is_allowed() {
    let cases: &[(&str, usize, &[&str])] = &[
        ("seed = 1", 1, &["no [[fault]]"]),
        ("seed = \"x\"", 1, &["invalid type"]),
        ("sede = 1\n[[fault]]", 1, &["unknown field `sede`", "`seed`"]),
        ("[[fault]]", 1, &["needs inject", "completion", "device_removal"]),
        ("[[fault]]\nname = \"x\"", 1, &["needs inject"]),
        ("[[fault]]\ninject = \"crash\"", 2, &["\"crash\" is none of", "slow_peer"]),
        ("[[fault]]\ninject = \"completion\"", 2, &["needs status"]),
        (
            "[[fault]]\ninject = \"completion\"\nstatus = \"retry\"",
            3,
            &["\"retry\" is none of", "retry_exc_err"],
        ),
        (
            "\n\n[[fault]]\ninject = \"completion\"\nstaus = \"fatal_err\"",
            5,
            &["unknown field `staus`", "`status`"],
        ),
        (
            "[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nstatus = \"fatal_err\"",
            4,
            &["status means nothing with inject = \"delay\"", "jitter", "probability"],
        ),
        ("[[fault]]\ninject = \"delay\"\ntime = \"5\"", 3, &["is no time", "\"5ms\""]),
        ("[[fault]]\ninject = \"delay\"\ntime = 5", 3, &["time = 5 is no time", "\"5ms\""]),
        ("[[fault]]\ninject = \"delay\"\ntime = 1.5", 3, &["time: expected", "\"5ms\""]),
        ("[[fault]]\ninject = \"delay\"", 2, &["needs time"]),
        ("[[fault]]\ninject = \"refuse\"\nerrno = \"ENOMEM\"", 2, &["needs call", "reg_mr"]),
        ("[[fault]]\ninject = \"refuse\"\ncall = \"reg_mr\"", 2, &["needs errno"]),
        (
            "[[fault]]\ninject = \"refuse\"\ncall = \"regmr\"\nerrno = \"ENOMEM\"",
            3,
            &["\"regmr\" is none of", "reg_mr"],
        ),
        (
            "[[fault]]\ninject = \"refuse\"\ncall = [\"reg_mr\", \"x\"]\nerrno = \"ENOMEM\"",
            3,
            &["\"x\" is none of"],
        ),
        ("[[fault]]\ninject = \"refuse\"\ncall = []\nerrno = \"ENOMEM\"", 3, &["names nothing"]),
        (
            "[[fault]]\ninject = \"refuse\"\ncall = \"reg_mr\"\nerrno = \"EWHAT\"",
            4,
            &["\"EWHAT\" is none of", "ENOMEM"],
        ),
        (
            "[[fault]]\ninject = \"refuse\"\ncall = \"reg_mr\"\nerrno = \"EIO\"\nstate = \"rtr\"",
            5,
            &["modify_qp"],
        ),
        (
            "[[fault]]\ninject = \"refuse\"\ncall = \"modify_qp\"\nerrno = \"EIO\"\nstate = \"up\"",
            5,
            &["\"up\" is none of", "rtr"],
        ),
        ("[[fault]]\ninject = \"dead_peer\"", 2, &["needs to know when", "after", "nth"]),
        (
            "[[fault]]\ninject = \"dead_peer\"\ncall = \"reg_mr\"",
            3,
            &["needs a queue pair", "modify_qp"],
        ),
        ("[[fault]]\ninject = \"event\"\nafter = \"1s\"", 2, &["needs event", "gid_change"]),
        (
            "[[fault]]\ninject = \"event\"\nevent = \"device_fatal\"\nafter = \"1s\"",
            3,
            &["device_removal"],
        ),
        (
            "[[fault]]\ninject = \"event\"\nevent = \"cq_err\"\nafter = \"1s\"\nevery = \"1us\"",
            5,
            &["less than 1ms"],
        ),
        (
            "[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nside = \"both\"",
            4,
            &["\"both\" is none of: send, recv"],
        ),
        (
            "[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nside = \"recv\"\nopcode = \"send\"",
            5,
            &["does not know what will come"],
        ),
        (
            "[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nopcode = \"write\"",
            4,
            &["\"write\" is none of", "rdma_write"],
        ),
        (
            "[[fault]]\ninject = \"port_down\"\ncall = \"reg_mr\"\nside = \"send\"",
            3,
            &["call and side"],
        ),
        ("[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nbytes = \"9..8\"", 4, &["4K..64K"]),
        ("[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nqp = 0", 4, &["counts from 1"]),
        ("[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nqp = -1", 4, &[]),
        ("[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nnth = 0", 4, &["nth counts from 1"]),
        ("[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\ncount = 0", 4, &["count counts from 1"]),
        ("[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nevery = 0", 4, &["every counts from 1"]),
        ("[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nevery = \"1s\"", 4, &["is a number here"]),
        ("[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nprobability = 1.5", 4, &["from 0 to 1"]),
        ("[[fault]]\ninject = \"delay\"\ntime = \"5ms\"\nprobability = nan", 4, &["from 0 to 1"]),
        ("[[fault]\n", 1, &[]),
        ("seed = 1\n[fault]\ninject = \"dead_peer\"\nnth = 1", 2, &["begins with [[fault]]"]),
    ];
    refused(cases);
}

/// Each text is refused, with the line and words that it is given with.
fn refused(cases: &[(&str, usize, &[&str])]) {
    for (text, line, words) in cases {
        let error = parse(text).expect_err(text);
        assert_eq!((error.file.as_str(), error.line), ("plan.toml", *line), "{text}\n{error}");
        for word in *words {
            assert!(error.what.contains(word), "{word:?} in\n{text}\n{error}");
        }
        assert!(error.to_string().starts_with(&format!("plan.toml:{line}: ")), "{error}");
        assert!(!error.to_string().contains('\n'));
    }
}

#[test]
fn filters_that_nothing_can_pass_are_refused() {
    let refusal = |call: &str, filter: &str| {
        format!("[[fault]]\ninject = \"refuse\"\nerrno = \"EIO\"\ncall = {call}\n{filter}")
    };
    for (call, filter, words) in [
        ("\"reg_mr\"", "qp = 1", "qp means nothing to reg_mr, but to: modify_qp"),
        ("\"create_qp\"", "bytes = \"4K..\"", "bytes means nothing to create_qp, but to: reg_mr"),
        ("\"reg_mr\"", "cq = 1", "cq means nothing to reg_mr, but to: "),
        ("\"post_srq_recv\"", "qp_num = 1", "qp_num means nothing to post_srq_recv"),
        ("[\"poll_cq\", \"reg_mr\"]", "qp = 1", "qp means nothing to poll_cq, reg_mr"),
        ("\"modify_qp\"", "qp = []", "qp = [] names nothing"),
        ("\"modify_qp\"", "cq = []", "cq = [] names nothing"),
        ("\"modify_qp\"", "qp_num = []", "qp_num = [] names nothing"),
        ("\"modify_qp\"", "program = []", "program = [] names nothing"),
        ("\"modify_qp\"", "qp = \"1\"", "qp: expected a number"),
        ("\"modify_qp\"", "qp_num = 0x1000000000", "qp_num: expected a number of 32 bits"),
        ("\"post_send\"", "opcode = 5", "opcode: expected a name in quotes"),
        ("\"post_send\"", "every = 1.5", "every: expected a whole number"),
    ] {
        refused(&[(&refusal(call, filter), 5, &[words])]);
    }
    for (call, filter) in [
        ("\"poll_cq\"", "cq = 1"),
        ("\"rereg_mr\"", "bytes = \"4K..\""),
        ("[\"reg_mr\", \"modify_qp\"]", "qp = 1"),
    ] {
        parse(&refusal(call, filter)).unwrap_or_else(|error| panic!("{error}"));
    }
    for (body, words) in [
        ("inject = \"device_removal\"\nafter = \"1s\"\nqp = 1", "strikes all queue pairs"),
        ("inject = \"cm_event\"\nevent = \"addr_error\"\nqp = 1", "qp means nothing to resolve"),
        (
            "inject = \"event\"\nevent = \"srq_err\"\nside = \"recv\"\nqp = 1",
            "qp means nothing to post_srq_recv",
        ),
    ] {
        let error = parse(&format!("[[fault]]\n{body}")).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_receive_is_of_a_queue_pair_or_of_a_shared_queue() {
    let trigger = |body: &str| fault(&format!("{body}\nside = \"recv\"\nnth = 2")).trigger;
    let of = |call| Trigger::Calls(vec![call]);
    assert_eq!(trigger("inject = \"dead_peer\""), of(Call::PostRecv));
    for &event in EventKind::ALL {
        let calls = trigger(&format!("inject = \"event\"\nevent = \"{}\"", event.name()));
        let expected = match event {
            EventKind::SrqErr | EventKind::SrqLimitReached => of(Call::PostSrqRecv),
            event if event.is_of_port() => Trigger::Calls(vec![Call::PostRecv, Call::PostSrqRecv]),
            _ => of(Call::PostRecv),
        };
        assert_eq!(calls, expected, "{event:?}");
    }
    let limit = "inject = \"event\"\nevent = \"srq_err\"\ncall = \"post_srq_recv\"";
    assert_eq!(fault(limit).trigger, of(Call::PostSrqRecv));
}

/// The documentation.
fn documentation() -> String {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/faults.md");
    std::fs::read_to_string(file).unwrap()
}

#[test]
fn the_examples_of_the_documentation_are_plans() {
    let text = documentation();
    let blocks = text.split("\n\n").filter(|block| {
        let code = block.trim_start_matches('\n').starts_with("    ");
        code && block.contains("[[fault]]")
    });
    let mut plans = 0;
    for block in blocks {
        if let Err(error) = parse(block) {
            panic!("{error} in\n{block}");
        }
        plans += 1;
    }
    assert_eq!(plans, 13, "the tutorial's and twelve");
}

#[test]
fn the_documentation_names_every_word() {
    let text = documentation();
    let calls = Call::ALL.iter().map(|call| call.name());
    let opcodes = Opcode::ALL.iter().map(|opcode| opcode.name());
    let errnos = Errno::ALL.iter().map(|errno| errno.name);
    for word in calls.chain(opcodes).chain(errnos) {
        assert!(text.contains(word), "{word}");
    }
}

#[test]
fn events_of_rdma_cm_come_at_their_calls() {
    let error = fault("inject = \"cm_event\"\nevent = \"RDMA_CM_EVENT_ROUTE_ERROR\"");
    assert_eq!(error.inject, Inject::CmEvent(CmEvent::RouteError, -110));
    assert_eq!(error.trigger, Trigger::Calls(vec![Call::ResolveRoute]));
    let refused = fault("inject = \"cm_event\"\nevent = \"rejected\"\ncall = \"accept\"\nnth = 2");
    assert_eq!(refused.inject, Inject::CmEvent(CmEvent::Rejected, 28));
    assert_eq!(refused.trigger, Trigger::Calls(vec![Call::Accept]));
    let named = fault("inject = \"cm_event\"\nevent = \"unreachable\"\nerrno = \"EIO\"");
    assert_eq!(named.inject, Inject::CmEvent(CmEvent::Unreachable, -5));
    for event in CmEvent::ALL {
        let plan = format!("inject = \"cm_event\"\nevent = \"{}\"", event.name());
        assert_eq!(fault(&plan).trigger, Trigger::Calls(vec![event.calls()[0]]));
    }
    for (body, wanted) in [
        ("inject = \"cm_event\"", "needs event"),
        ("inject = \"cm_event\"\nevent = \"established\"", "is none of: addr_error, "),
        ("inject = \"cm_event\"\nevent = \"device_removal\"", "write inject = \"device_removal\""),
        (
            "inject = \"cm_event\"\nevent = \"addr_error\"\ncall = \"connect\"",
            "addr_error is no event of connect, but of: resolve_addr",
        ),
        ("inject = \"cm_event\"\nevent = \"addr_error\"\nstate = \"err\"", "state means nothing"),
    ] {
        let error = parse(&format!("[[fault]]\n{body}\n")).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}
