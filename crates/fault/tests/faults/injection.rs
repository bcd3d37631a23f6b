//! What is struck, when, and that it is the same each time.

use quipu_fault::*;
use quipu_nic::{Fate, Time, WcStatus};

const MS: u64 = 1_000_000;

fn injector_with(plan: &str, replay: Option<&str>) -> Injector {
    let plan = Plan::parse(plan, "plan.toml").unwrap_or_else(|error| panic!("{error}"));
    let replay = replay.map(|log| Replay::parse(log, "log", &plan).unwrap());
    let process = Process { program: "test", env: &|_| None };
    Injector::new(&plan, &process, replay, Time(1000))
}

fn injector(plan: &str) -> Injector {
    injector_with(plan, None)
}

fn send(qp: u32) -> Occasion {
    let qp = QpRef { nth: qp, num: 0x1000 + qp, cqs: [qp, qp + 100], has_srq: qp == 2 };
    Occasion { opcode: Some(Opcode::Send), ..Occasion::of(Call::PostSend) }
        .about(Some(qp))
        .with_bytes(64)
}

/// Which of `count` sends of queue pair 1 are struck.
fn struck(plan: &str, count: u64) -> Vec<u64> {
    let mut injector = injector(plan);
    (1..=count).filter(|_| !injector.call(Time(2000), &send(1)).is_empty()).collect()
}

fn fails(when: &str) -> String {
    format!("[[fault]]\ninject = \"completion\"\nstatus = \"fatal_err\"\n{when}")
}

#[test]
fn schedules_say_which_of_the_matching_ones() {
    assert_eq!(struck(&fails(""), 5), [1]);
    assert_eq!(struck(&fails("nth = 3"), 9), [3]);
    assert_eq!(struck(&fails("nth = 3\ncount = 2"), 9), [3, 4]);
    assert_eq!(struck(&fails("every = 3"), 10), [3, 6, 9]);
    assert_eq!(struck(&fails("every = 3\nnth = 1\ncount = 3"), 20), [1, 4, 7]);
    assert!(struck(&fails("probability = 0"), 100).is_empty());
    assert_eq!(struck(&fails("probability = 1\ncount = 2"), 100), [1, 2]);
    let some = struck(&fails("probability = 0.1"), 10_000);
    assert!((800..1200).contains(&some.len()), "{}", some.len());
}

#[test]
fn events_of_shared_queues_are_of_queue_pairs_that_have_one() {
    for event in ["srq_err", "srq_limit_reached"] {
        let mut injector =
            injector(&format!("[[fault]]\ninject = \"event\"\nevent = \"{event}\"\nnth = 2\n"));
        let struck: Vec<bool> = [1, 1, 2, 1, 2]
            .map(|qp| !injector.call(Time(2000), &send(qp)).is_empty())
            .into_iter()
            .collect();
        assert_eq!(struck, [false, false, false, false, true]);
    }
}

#[test]
fn a_seed_strikes_the_same_ones_each_time_and_another_seed_others() {
    let plan = |seed: u64| format!("seed = {seed}\n{}", fails("probability = 0.05"));
    assert_eq!(struck(&plan(7), 2000), struck(&plan(7), 2000));
    assert_ne!(struck(&plan(7), 2000), struck(&plan(8), 2000));
    // What another rule draws does not matter.
    let other = "[[fault]]\ninject = \"event\"\nevent = \"gid_change\"\nprobability = 0.5\n";
    let mut both = injector(&(plan(7) + "\n" + other));
    let fated = |effects: Vec<Effect>| effects.iter().any(|e| matches!(e, Effect::Fate(_)));
    let with: Vec<u64> = (1..=2000).filter(|_| fated(both.call(Time(2000), &send(1)))).collect();
    assert_eq!(with, struck(&plan(7), 2000));
}

#[test]
fn filters_leave_others_alone_and_uncounted() {
    let mut injector = injector(&fails("qp = 2\nnth = 2"));
    for _ in 0..5 {
        assert_eq!(injector.call(Time(2000), &send(1)), []);
    }
    assert_eq!(injector.call(Time(2000), &send(2)), []);
    let fate = Effect::Fate(Fate::Fail(WcStatus::FatalErr));
    assert_eq!(injector.call(Time(2000), &send(2)), [fate]);
    for (filter, expected) in [
        ("opcode = \"send\"", true),
        ("opcode = \"rdma_read\"", false),
        ("bytes = 64", true),
        ("bytes = \"65..\"", false),
        ("qp_num = 0x1001", true),
        ("qp_num = 0x1002", false),
        ("cq = 101", true),
        ("cq = 2", false),
    ] {
        assert_eq!(struck(&fails(filter), 1).len() == 1, expected, "{filter}");
    }
}

#[test]
fn nothing_counts_before_its_time() {
    let mut injector = injector(&fails("after = \"1ms\"\nnth = 2"));
    assert_eq!(injector.call(Time(1000), &send(1)), []);
    assert_eq!(injector.call(Time(1000 + MS - 1), &send(1)), []);
    assert_eq!(injector.call(Time(1000 + MS), &send(1)), []);
    assert_eq!(injector.call(Time(1000 + MS), &send(1)).len(), 1);
}

#[test]
fn the_first_fate_in_the_plan_counts_and_what_befalls_all_is_added() {
    let plan = fails("nth = 2")
        + "\n[[fault]]\ninject = \"slow_peer\"\ntime = \"1ms\"\n"
        + "[[fault]]\ninject = \"dead_peer\"\nnth = 2\n";
    let mut injector = injector(&plan);
    let late = Effect::Fate(Fate::From(Time(2000 + MS)));
    assert_eq!(injector.call(Time(2000), &send(1)), [late]);
    let fate = Effect::Fate(Fate::Fail(WcStatus::FatalErr));
    assert_eq!(injector.call(Time(2000), &send(1)), [fate, Effect::DeadPeer]);
    assert_eq!(injector.injected(), 3);
    let tallies: Vec<_> =
        injector.tallies().map(|(_, _, matched, struck)| (matched, struck)).collect();
    assert_eq!(tallies, [(2, 1), (2, 1), (2, 1)]);
}

#[test]
fn calls_are_refused() {
    let mut injector = injector(
        "[[fault]]\ninject = \"refuse\"\ncall = [\"reg_mr\", \"create_qp\"]\nerrno = \"ENOMEM\"\n\
         bytes = \"1M..\"\n[[fault]]\ninject = \"refuse\"\ncall = \"create_cq\"\nerrno = \"EIO\"",
    );
    let now = Time(2000);
    assert_eq!(injector.call(now, &Occasion::of(Call::RegMr).with_bytes(5)), []);
    let refused = injector.call(now, &Occasion::of(Call::RegMr).with_bytes(1 << 20));
    assert_eq!(refused, [Effect::Refuse(Errno::named("ENOMEM").unwrap())]);
    assert_eq!(injector.call(now, &Occasion::of(Call::CreateCq)), [Effect::Refuse(Errno::EIO)]);
    assert_eq!(injector.call(now, &Occasion::of(Call::CreateCq)), []);
}

#[test]
fn the_clock_strikes_at_its_time_and_period() {
    let mut injector = injector(
        "[[fault]]\ninject = \"port_down\"\ntime = \"1ms\"\nafter = \"5ms\"\nevery = \"10ms\"\n\
         count = 3\n[[fault]]\ninject = \"dead_peer\"\nqp = 2\nafter = \"7ms\"",
    );
    assert_eq!(injector.poll_timeout(), Some(Time(1000 + 5 * MS)));
    assert!(injector.tick(Time(4 * MS), |_| true).is_empty());
    let strikes = injector.tick(Time(1000 + 7 * MS), |_| true);
    let effects: Vec<_> = strikes.iter().map(|strike| strike.effect).collect();
    assert_eq!(effects, [Effect::PortDown(Some(MS)), Effect::DeadPeer]);
    let of = |nth| QpRef { nth, num: 9, cqs: [1, 1], has_srq: false };
    assert!(strikes[1].concerns(&of(2)) && !strikes[1].concerns(&of(1)));
    assert_eq!(injector.poll_timeout(), Some(Time(1000 + 15 * MS)));
    assert_eq!(injector.tick(Time(1000 + 100 * MS), |_| true).len(), 2);
    assert_eq!(injector.poll_timeout(), None);
}

#[test]
fn of_a_long_stop_not_every_period_is_made_up_for() {
    let mut injector =
        injector("[[fault]]\ninject = \"dead_peer\"\nafter = \"5ms\"\nevery = \"2ms\"");
    assert_eq!(injector.tick(Time(1000 + 5 * MS), |_| true).len(), 1);
    assert_eq!(injector.tick(Time(1000 + 12 * MS), |_| true).len(), 3);
    assert_eq!(injector.tick(Time(1000 + 3_600_000 * MS), |_| true).len(), 1000);
    // It goes on in step.
    assert_eq!(injector.poll_timeout(), Some(Time(1000 + 3_600_001 * MS)));
}

#[test]
fn what_finds_nothing_is_not_injected() {
    let mut injector =
        injector("[[fault]]\ninject = \"dead_peer\"\nafter = \"5ms\"\nevery = \"1ms\"\ncount = 1");
    assert!(injector.tick(Time(1000 + 7 * MS), |_| false).is_empty());
    assert_eq!((injector.injected(), injector.poll_record()), (0, None));
    assert_eq!(injector.tick(Time(1000 + 8 * MS), |_| true).len(), 1, "there is a queue pair now");
    assert_eq!((injector.injected(), injector.poll_timeout()), (1, None));
}

#[test]
fn the_device_is_removed_once() {
    let mut injector = injector(
        "[[fault]]\ninject = \"device_removal\"\nafter = \"5ms\"\nevery = \"1ms\"\n\
         [[fault]]\ninject = \"device_removal\"\ncall = \"poll_cq\"\nevery = 1",
    );
    assert_eq!(injector.tick(Time(1000 + 9 * MS), |_| true).len(), 1);
    assert_eq!(injector.poll_timeout(), None);
    assert_eq!(injector.call(Time(1000 + 9 * MS), &Occasion::of(Call::PollCq)), []);
    assert_eq!(injector.injected(), 1);
}

#[test]
fn a_completion_queue_fails_that_the_plan_names_or_the_operation_is_of() {
    let struck = |filter: &str, call: Call| {
        let event = "[[fault]]\ninject = \"event\"\nevent = \"cq_err\"\n";
        let mut injector = injector(&format!("{event}{filter}\ncall = \"{}\"", call.name()));
        injector.call(Time(2000), &Occasion { call, ..send(1) })
    };
    let only = |send, recv| vec![Effect::CqErr { send, recv }];
    assert_eq!(struck("", Call::PostSend), only(true, false));
    assert_eq!(struck("", Call::PostRecv), only(false, true));
    assert_eq!(struck("", Call::QueryQp), only(true, true));
    assert_eq!(struck("cq = 101", Call::PostSend), only(false, true));
    assert_eq!(struck("cq = 1", Call::PostRecv), only(true, false));
    let mut by_clock =
        injector("[[fault]]\ninject = \"event\"\nevent = \"cq_err\"\nafter = \"0s\"");
    let strikes = by_clock.tick(Time(2000), |_| true);
    assert_eq!(strikes[0].effect, Effect::CqErr { send: true, recv: true });
}

#[test]
fn a_log_is_repeated_whenever_the_operations_come() {
    let plan = "seed = 3\n[[fault]]\ninject = \"refuse\"\ncall = \"reg_mr\"\nerrno = \"ENOMEM\"\n\
                after = \"50ms\"\nprobability = 0.5\n";
    let run = |replay: Option<&str>, early: u64| {
        let mut injector = injector_with(plan, replay);
        let at = |turn: u64| Time(1000 + if turn < early { 1 } else { 60 * MS });
        let refused: Vec<u64> = (0..40)
            .filter(|&turn| !injector.call(at(turn), &Occasion::of(Call::RegMr)).is_empty())
            .collect();
        let parsed = Plan::parse(plan, "plan.toml").unwrap();
        let mut log = json(&Header::new(&parsed, 7, "test")) + "\n";
        while let Some(record) = injector.poll_record() {
            log += &(json(&record) + "\n");
        }
        (refused, log)
    };
    let (refused, log) = run(None, 10);
    assert!(refused.len() > 5 && refused[0] >= 10, "{refused:?}");
    for early in [0, 3, 25, 40] {
        assert_eq!(run(Some(&log), early).0, refused, "{early}");
    }
}

/// The log of an injector that was shown `count` sends, and what they met.
fn logged(plan: &str, replay: Option<&str>, count: u64) -> (String, Vec<Vec<Effect>>) {
    let mut injector = injector_with(plan, replay);
    let effects = (0..count).map(|at| injector.call(Time(2000 + at), &send(1))).collect();
    let plan = Plan::parse(plan, "plan.toml").unwrap();
    let mut log = json(&Header::new(&plan, 7, "test")) + "\n";
    while let Some(record) = injector.poll_record() {
        assert!(record.to_string().contains("queue pair 1 (0x001001)"), "{record}");
        log += &(json(&record) + "\n");
    }
    (log, effects)
}

#[test]
fn a_log_is_repeated_exactly() {
    let plan = "seed = 3\n[[fault]]\ninject = \"slow_peer\"\ntime = \"1ms\"\njitter = \"9ms\"\n\
                probability = 0.1\n";
    let (log, effects) = logged(plan, None, 500);
    assert!(effects.iter().filter(|effects| !effects.is_empty()).count() > 20);
    let (again, same) = logged(plan, Some(&log), 500);
    assert_eq!((again, same), (log.clone(), effects));
    // A log that was cut by hand repeats what is left of it.
    let mut lines: Vec<&str> = log.lines().collect();
    lines.truncate(3);
    let (_, fewer) = logged(plan, Some(&lines.join("\n")), 500);
    assert_eq!(fewer.iter().filter(|effects| !effects.is_empty()).count(), 2);
}

#[test]
fn logs_that_cannot_be_repeated_are_refused() {
    let text = fails("nth = 1");
    let (log, _) = logged(&text, None, 3);
    let plan = Plan::parse(&text, "plan.toml").unwrap();
    let other = Plan::parse(&fails("nth = 2"), "plan.toml").unwrap();
    let refused =
        |text: &str, plan: &Plan| Replay::parse(text, "log", plan).unwrap_err().to_string();
    assert!(refused(&log, &other).contains("log:1: the log is of another plan"));
    assert!(refused("", &plan).contains("log:1: the log is empty"));
    assert!(refused("hello", &plan).contains("log:1: this is no log"));
    assert!(refused(&(log.clone() + "x"), &plan).contains("log:3: this is no fault"));
    assert!(
        refused(&(log.clone() + &log), &plan).contains("log:3: the log is of several processes")
    );
}

#[test]
fn faults_of_other_processes_are_not_there() {
    let text = fails("program = \"other\"\n");
    assert!(injector(&text).is_empty());
    assert!(!injector(&fails("program = [\"other\", \"test\"]")).is_empty());
}
