//! `quipu top` in a terminal, which script(1) makes.

use std::process::{Command, Stdio};

/// What is seen of a terminal in which a shell runs that line; `$0` is the command.
fn seen(line: &str) -> String {
    let quoted = format!("exec sh -c '{line}' {}", env!("CARGO_BIN_EXE_quipu"));
    let mut script = Command::new("script");
    // Nobody types; the end of what is typed would be a key.
    script.args(["-qec", &quoted, "/dev/null"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut running = script.spawn().unwrap();
    let _keyboard = running.stdin.take();
    String::from_utf8_lossy(&running.wait_with_output().unwrap().stdout).into_owned()
}

#[test]
fn a_signal_leaves_the_terminal_as_it_was() {
    for (signal, code) in [("TERM", 143), ("INT", 130), ("HUP", 129)] {
        // Once it has the terminal, typing is not shown any more.
        let line = format!(
            "\"$0\" top </dev/tty & for i in $(seq 600); do \
             stty -a | grep -q -e \" -icanon\" && break; sleep 0.1; done; \
             stty -a | grep -o -e \"-icanon\"; kill -s {signal} $!; wait $!; echo code=$?; stty -a"
        );
        let seen = seen(&line);
        let (before, after) = seen.split_once(&format!("code={code}")).expect(&seen);
        assert!(before.contains("-icanon") && before.contains("\x1b[?1049l"), "{seen}");
        assert!(after.contains(" icanon") && after.contains(" echo "), "{seen}");
    }
}

#[test]
fn what_is_no_terminal_is_not_drawn_to() {
    let output = Command::new(env!("CARGO_BIN_EXE_quipu")).arg("top").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("--once"), "{said}");
    assert!(output.stdout.is_empty());
}
