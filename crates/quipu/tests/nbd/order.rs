//! Requests that are repeated after a loss keep their order: a server that records it, replies out of
//! order, is killed, and goes silent.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use quipu_nbd::{Command, Export, Request, Server, ServerEvent, ServerOptions, Want};

use super::Folder;
use super::attach::Attached;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 512;

/// In a lie: the cookie of the request.
const THIS: u64 = 0xeeee_eeee_eeee_eeee;

/// What the server has executed, in order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Event {
    /// A write with this number in its data.
    Write(u64),
    Flush,
}

#[derive(Default)]
struct Disk {
    log: Vec<Event>,
    /// The number in each block, as the server has it, and as it is on the disk.
    volatile: HashMap<u64, u64>,
    durable: HashMap<u64, u64>,
}

/// The server. Nothing of an earlier life is executed in a later one.
struct Recorder {
    place: String,
    disk: Mutex<Disk>,
    life: AtomicU32,
    /// Requests are executed, but not replied to.
    is_mute: AtomicBool,
    /// What comes in place of replies, if anything.
    lie: Mutex<Vec<u8>>,
    streams: Mutex<Vec<TcpStream>>,
}

impl Recorder {
    fn start() -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let recorder = Arc::new(Self {
            place: listener.local_addr().unwrap().to_string(),
            disk: Mutex::default(),
            life: AtomicU32::new(0),
            is_mute: AtomicBool::new(false),
            lie: Mutex::default(),
            streams: Mutex::default(),
        });
        recorder.listen(listener);
        recorder
    }

    fn listen(self: &Arc<Self>, listener: TcpListener) {
        listener.set_nonblocking(true).unwrap();
        let (recorder, life) = (Arc::clone(self), self.life.load(Ordering::SeqCst));
        thread::spawn(move || {
            while recorder.life.load(Ordering::SeqCst) == life {
                match listener.accept() {
                    Ok((stream, _)) => recorder.attend(stream, life),
                    Err(_) => thread::sleep(Duration::from_millis(2)),
                }
            }
        });
    }

    fn attend(self: &Arc<Self>, stream: TcpStream, life: u32) {
        stream.set_nonblocking(false).unwrap();
        self.streams.lock().unwrap().push(stream.try_clone().unwrap());
        let recorder = Arc::clone(self);
        thread::spawn(move || recorder.serve(stream, life));
    }

    /// Serves a connection until it or the life ends.
    fn serve(self: Arc<Self>, mut stream: TcpStream, life: u32) -> Option<()> {
        let server = Server::new(ServerOptions::new(Export::new("", BLOCK * BLOCKS)));
        let server = Arc::new(Mutex::new(server));
        let mut data = Vec::new();
        loop {
            let wants = {
                let mut server = server.lock().unwrap();
                let output = std::mem::take(server.output());
                stream.write_all(&output).ok()?;
                server.wants()
            };
            let event = match wants {
                Want::Bytes(count) => {
                    let mut bytes = vec![0; count];
                    stream.read_exact(&mut bytes).ok()?;
                    server.lock().unwrap().input(&bytes).ok()?
                }
                Want::Payload { length, .. } | Want::Discard(length) => {
                    data.resize(length as usize, 0);
                    stream.read_exact(&mut data).ok()?;
                    server.lock().unwrap().payload_done()
                }
                Want::Nothing => return None,
            };
            if let Some(ServerEvent::Request(command, request)) = event {
                let (recorder, server) = (Arc::clone(&self), Arc::clone(&server));
                let (mut stream, data) = (stream.try_clone().ok()?, data.clone());
                // Each takes a time of its own: so the order is not that of the requests.
                thread::spawn(move || {
                    thread::sleep(Duration::from_micros(request.cookie.wrapping_mul(7919) % 4000));
                    if recorder.execute(life, command, &request, &data) {
                        let mut server = server.lock().unwrap();
                        server.reply_done(&request);
                        let reply = std::mem::take(server.output());
                        let mut lie = recorder.lie.lock().unwrap().clone();
                        if lie.get(8..16) == Some(&THIS.to_be_bytes()) {
                            lie[8..16].copy_from_slice(&request.cookie.to_be_bytes());
                        }
                        let _ = stream.write_all(if lie.is_empty() { &reply } else { &lie });
                    }
                });
            }
        }
    }

    /// Whether there is to be a reply.
    fn execute(&self, life: u32, command: Command, request: &Request, data: &[u8]) -> bool {
        let mut disk = self.disk.lock().unwrap();
        if self.life.load(Ordering::SeqCst) != life {
            return false;
        }
        match command {
            Command::Write => {
                let number = u64::from_le_bytes(data[..8].try_into().unwrap());
                disk.log.push(Event::Write(number));
                disk.volatile.insert(request.offset / BLOCK, number);
            }
            Command::Flush => {
                disk.log.push(Event::Flush);
                disk.durable = disk.volatile.clone();
            }
            _ => {}
        }
        !self.is_mute.load(Ordering::SeqCst)
    }

    /// Executes what comes without a reply for a while, and dies. What is not on the disk stays in the
    /// memory of the machine.
    fn kill(&self) {
        self.is_mute.store(true, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(20));
        let disk = self.disk.lock().unwrap();
        self.life.fetch_add(1, Ordering::SeqCst);
        drop(disk);
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.is_mute.store(false, Ordering::SeqCst);
    }

    fn revive(self: &Arc<Self>) {
        let begun = Instant::now();
        let listener = loop {
            match TcpListener::bind(&self.place) {
                Ok(listener) => break listener,
                Err(error) => assert!(begun.elapsed().as_secs() < 10, "{error}"),
            }
            thread::sleep(Duration::from_millis(5));
        };
        self.listen(listener);
    }

    /// Goes silent on all connections, as when the network is cut; new ones work.
    fn cut(self: &Arc<Self>) {
        let disk = self.disk.lock().unwrap();
        self.life.fetch_add(1, Ordering::SeqCst);
        drop(disk);
        self.revive();
    }

    fn position(&self) -> usize {
        self.disk.lock().unwrap().log.len()
    }
}

/// A write that a program knows to be done.
#[derive(Clone, Copy)]
struct Written {
    number: u64,
    block: u64,
    /// The length of the record then.
    done: usize,
}

/// A flush that a program made.
struct Flushed {
    /// What was written before.
    before: Vec<Written>,
    /// The length of the record before and after.
    from: usize,
    to: usize,
}

/// What programs know.
#[derive(Default)]
struct Known {
    written: Vec<Written>,
    flushed: Vec<Flushed>,
}

/// Writes of each program.
const STEPS: u64 = 80;

/// Writes blocks of its own in turn; two of the programs flush, too.
fn program(file: &File, own: u64, recorder: &Recorder, serial: &AtomicU64, known: &Mutex<Known>) {
    for step in 0..STEPS {
        let (number, block) = (serial.fetch_add(1, Ordering::SeqCst) + 1, own * 8 + step % 8);
        let data = number.to_le_bytes().repeat(BLOCK as usize / 8);
        file.write_all_at(&data, block * BLOCK).unwrap();
        let done = recorder.position();
        known.lock().unwrap().written.push(Written { number, block, done });
        if own < 2 && step % 7 == 6 {
            let before = known.lock().unwrap().written.clone();
            let from = recorder.position();
            file.sync_all().unwrap();
            let to = recorder.position();
            known.lock().unwrap().flushed.push(Flushed { before: before.clone(), from, to });
            // What was written before is on the disk.
            let disk = recorder.disk.lock().unwrap();
            for Written { number, block, .. } in before {
                assert!(disk.durable.get(&block) >= Some(&number), "{number} is not on the disk");
            }
        }
    }
}

#[test]
fn the_record_of_a_server_shows_that_no_write_passes_a_flush() {
    let folder = Folder::new("order");
    let recorder = Recorder::start();
    let uri = format!("nbd://{}", recorder.place);
    let arguments = ["--reconnect", "60", "--timeout", "2", &uri];
    let Some(attached) = Attached::new(&folder, &arguments) else { return };
    let file = File::options().write(true).open(attached.file()).unwrap();
    let (serial, known) = (AtomicU64::new(0), Mutex::new(Known::default()));
    thread::scope(|scope| {
        for own in 0..12 {
            let (file, recorder, serial, known) = (&file, &recorder, &serial, &known);
            scope.spawn(move || program(file, own, recorder, serial, known));
        }
        for part in 1..=4 {
            let begun = Instant::now();
            while recorder.position() < part * 180 && begun.elapsed().as_secs() < 20 {
                thread::sleep(Duration::from_millis(1));
            }
            if part == 4 {
                recorder.cut();
            } else {
                recorder.kill();
                thread::sleep(Duration::from_millis(60));
                recorder.revive();
            }
        }
    });
    drop(file);
    attached.end();

    let (known, log) = (known.into_inner().unwrap(), &recorder.disk.lock().unwrap().log);
    let mut executed: HashMap<u64, Vec<usize>> = HashMap::new();
    for (at, event) in log.iter().enumerate() {
        if let Event::Write(number) = event {
            executed.entry(*number).or_default().push(at);
        }
    }
    assert_eq!(known.written.len() as u64, 12 * STEPS);
    for Written { number, done, .. } in &known.written {
        let last = executed[number].last().unwrap();
        assert!(last < done, "write {number} was executed again after its reply");
    }
    for Flushed { before, from, to } in &known.flushed {
        // Between the call and its return there is a flush, and all earlier writes come before that.
        assert!(log[*from..*to].contains(&Event::Flush));
        assert!(before.iter().all(|it| executed[&it.number].last() < Some(from)));
    }
    let repeated = executed.values().filter(|times| times.len() > 1).count();
    assert!(repeated > 0, "nothing was repeated");
}

#[test]
fn a_client_that_cannot_connect_again_reports_errors() {
    let folder = Folder::new("order-lost");
    let recorder = Recorder::start();
    let uri = format!("nbd://{}", recorder.place);
    let Some(attached) = Attached::new(&folder, &["--reconnect", "1", &uri]) else { return };
    let file = File::options().write(true).open(attached.file()).unwrap();
    file.write_all_at(&[1; 4096], 0).unwrap();
    file.sync_all().unwrap();
    recorder.kill();
    let begun = Instant::now();
    assert_eq!(file.write_all_at(&[2; 4096], 0).unwrap_err().raw_os_error(), Some(5));
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(file.sync_all().unwrap_err().raw_os_error(), Some(5));
    // When it is back, everything goes on.
    recorder.revive();
    file.write_all_at(&[3; 4096], 0).unwrap();
    file.sync_all().unwrap();
    let number = u64::from_le_bytes([3; 8]);
    assert_eq!(recorder.disk.lock().unwrap().durable[&0], number);
    drop(file);
    attached.end();
}

#[test]
fn a_server_that_lies_loses_its_connection_and_the_file_goes_on() {
    let folder = Folder::new("order-lies");
    let recorder = Recorder::start();
    let uri = format!("nbd://{}", recorder.place);
    let Some(attached) = Attached::new(&folder, &[&uri]) else { return };
    let file = File::options().read(true).write(true).open(attached.file()).unwrap();
    let chunk = |cookie: u64, kind: u16, length: u64| {
        let mut bytes = 0x6e8a_278c_u32.to_be_bytes().to_vec();
        bytes.extend([0, 1]);
        bytes.extend(kind.to_be_bytes());
        for word in [cookie, 0, length] {
            bytes.extend(word.to_be_bytes());
        }
        bytes
    };
    // Noise, an unknown request, an error that is endless, data that nobody asked for.
    for lie in
        [vec![0xff; 64], chunk(99, 0, 0), chunk(THIS, 0x8001, u64::MAX), chunk(THIS, 1, 4104)]
    {
        *recorder.lie.lock().unwrap() = lie;
        let begun = Instant::now();
        assert_eq!(file.write_all_at(&[2; 4096], 0).unwrap_err().raw_os_error(), Some(5));
        assert!(begun.elapsed() < Duration::from_secs(10));
        recorder.lie.lock().unwrap().clear();
        file.write_all_at(&[3; 4096], 0).unwrap();
    }
    drop(file);
    attached.end();
}
