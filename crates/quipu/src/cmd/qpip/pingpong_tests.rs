//! Round trips with servers that answer late, or not at all, or end the connection.

use std::thread::scope;

use clap::Parser;
use quipu::qpip::{Mode, TcpSettings};

use super::super::tests::adapter;
use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    options: Options,
}

fn line(words: &[&str]) -> Options {
    Line::try_parse_from([&["pingpong"], words].concat()).unwrap().options
}

/// How late the answers are.
const LATE: Duration = Duration::from_millis(50);

/// Answers so many datagrams, each twice and `LATE`; and one of them later than anybody waits.
fn answer_late(socket: &UdpSocket, count: usize) {
    let mut buffer = [0; 100];
    scope(|scope| {
        for number in 0..count {
            let (len, from) = socket.recv_from(&mut buffer).unwrap();
            let datagram = buffer[..len].to_vec();
            scope.spawn(move || {
                let more = if number == 2 { PATIENCE } else { Duration::ZERO };
                std::thread::sleep(LATE + more);
                for _ in 0..2 {
                    let _ = socket.send_to(&datagram, from);
                }
            });
        }
    });
}

#[test]
fn a_late_answer_is_none_to_a_later_round() {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let to = socket.local_addr().unwrap();
    for words in [&["--size", "1"] as &[&str], &["--size", "64", "--wait"]] {
        let options = line(&[&["--socket", "--udp", "-n", "8"], words].concat());
        let (samples, _) = scope(|scope| {
            scope.spawn(|| answer_late(&socket, 8));
            socket_udp(&options, to).unwrap()
        });
        let least = Samples::new(samples).percentile(0);
        assert!(least >= LATE.as_nanos() as u64, "least {least} ns");
    }
}

#[test]
fn an_answer_comes_from_the_server_and_to_the_last_message() {
    let (here, there, stranger) = (adapter(), adapter(), adapter());
    let options = line(&["--udp", "-n", "1", "--size", "8", "--wait"]);
    let end = End::new(&here, &options).unwrap();
    let ends = [&there, &stranger].map(|it| End::new(it, &options).unwrap());
    let udp = |end: &End<'_>| end.pd.queue_pair(&end.sends, &end.receives).build_udp(0).unwrap();
    let (client, [server, other]) = (udp(&end), [udp(&ends[0]), udp(&ends[1])]);
    let address = |adapter: &Adapter, qp: &UdpQueuePair| {
        SocketAddr::new(adapter.info().unwrap().addresses[0], qp.port())
    };
    let (to, back) = (address(&there, &server), address(&here, &client));
    for place in 0..PLACES as u64 {
        client.post_recv(place, &end.room(place).unwrap()).unwrap();
    }
    // Somebody else's, one of a round before, and the answer.
    let send = |end: &End<'_>, qp: &UdpQueuePair, round: u32| {
        end.memory.write(0, &mark(round, 8)).unwrap();
        qp.send_to(&Request::send(&end.message().unwrap()), back).unwrap();
        assert_eq!(end.next(&end.sends, None).unwrap().unwrap().status, WcStatus::Success);
    };
    let seen = |round| {
        let done = end.next(&end.receives, Some(Instant::now() + Duration::from_secs(20)));
        let done = done.unwrap().expect("it comes");
        client.post_recv(done.wr_id, &end.room(done.wr_id).unwrap()).unwrap();
        end.is_answer(&done, to, &mark(round, 8)).unwrap()
    };
    send(&ends[1], &other, 7);
    assert!(!seen(7));
    send(&ends[0], &server, 6);
    assert!(!seen(7));
    send(&ends[0], &server, 7);
    assert!(seen(7));
}

#[test]
fn who_answers_nothing_is_told_of_however_few_are_asked_for() {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let options = line(&["--socket", "--udp", "-n", "1"]);
    let said = socket_udp(&options, socket.local_addr().unwrap()).unwrap_err().to_string();
    assert!(said.contains("nothing comes back"), "{said}");
}

#[test]
fn who_waits_for_a_datagram_sleeps() {
    let (here, there) = (adapter(), adapter());
    let options = line(&["--udp", "-n", "1", "--wait"]);
    let silent = End::new(&there, &options).unwrap();
    let qp = silent.pd.queue_pair(&silent.sends, &silent.receives).build_udp(0).unwrap();
    let to = SocketAddr::new(there.info().unwrap().addresses[0], qp.port());
    let before = own_time();
    let said = End::new(&here, &options).unwrap().by_udp(to).unwrap_err().to_string();
    assert!(said.contains("nothing comes back"), "{said}");
    let spent = own_time() - before;
    assert!(spent < PATIENCE / 2, "{spent:?} of a second that it waits");
}

/// Processor time of this thread.
fn own_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn where_no_datagram_gets_to_the_server_is_not_asked_for() {
    let here = adapter();
    let options = line(&["--udp", "-n", "1", "--wait"]);
    let end = End::new(&here, &options).unwrap();
    let said = end.by_udp("192.0.2.1:5002".parse().unwrap()).unwrap_err().to_string();
    assert!(
        said.contains("cannot connect to 192.0.2.1:5002") && said.contains("--gateway"),
        "{said}"
    );
}

#[test]
fn a_reset_behind_the_last_answer_takes_no_result_away() {
    let (here, there) = (adapter(), adapter());
    let settings = TcpSettings { mode: Mode::Stream, ..TcpSettings::default() };
    let listener = there.listen(0, &settings, 1).unwrap();
    let options = line(&["-n", "1", "--wait"]);
    let server = End::new(&there, &options).unwrap();
    let qp = server.pd.queue_pair(&server.sends, &server.receives).build_tcp().unwrap();
    qp.post_recv(0, &server.room(0).unwrap()).unwrap();
    listener.offer(&qp).unwrap();
    let to = SocketAddr::new(there.info().unwrap().addresses[0], listener.port());
    let end = End::new(&here, &options).unwrap();
    scope(|scope| {
        let asked = scope.spawn(|| end.by_tcp(to).unwrap());
        server.next(&server.receives, None).unwrap();
        qp.post_send(&Request::send(&server.message().unwrap())).unwrap();
        server.next(&server.sends, None).unwrap();
        qp.abort().unwrap();
        assert_eq!(asked.join().unwrap().len(), 1);
    });
}
