//! A folder as clients see it.

use std::os::unix::fs::symlink;
use std::time::Duration;

use quipu::{Config, Device};

use super::super::memory::PIECE;
use super::*;

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("quipu-files-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn memory(plenty: u64) -> Memory {
    let config =
        Config { address: Some([127, 0, 0, 1].into()), counters: false, ..Config::default() };
    let pd = Device::open(config).unwrap().protection_domain().unwrap();
    Memory::with_plenty(&pd, plenty)
}

fn text(content: &Content, source: &mut Source) -> String {
    if content.len == 0 {
        return String::new();
    }
    let (region, at, len) = content.data.piece(&mut source.memory, 0, content.len).unwrap();
    String::from_utf8(region.to_vec(at, len).unwrap()).unwrap()
}

/// Waits until what was written is known to be all that its stamp stands for.
fn settle() {
    std::thread::sleep(Duration::from_millis(2100));
}

fn status(found: Result<Content, Otherwise>) -> Status {
    match found {
        Err(Otherwise::Refused(status)) => status,
        other => panic!("{other:?}"),
    }
}

#[test]
fn files_are_found_and_found_again_when_they_change() {
    let (folder, memory) = (Folder::new("change"), memory(1 << 20));
    let name = folder.0.join("a b.txt");
    fs::write(&name, "first").unwrap();
    fs::write(folder.0.join("empty"), "").unwrap();
    let mut source = Source::folder(memory, &folder.0).unwrap();
    assert_eq!(source.find("/a b.txt").unwrap().version.date(), None, "it may change again");
    let early = SystemTime::now() - Duration::from_secs(10);
    let file = fs::File::options().write(true).open(&name).unwrap();
    file.set_modified(early).unwrap();
    settle();
    let content = source.find("/a b.txt").unwrap();
    assert_eq!(
        (text(&content, &mut source).as_str(), content.media_type),
        ("first", http::media_type(".txt"))
    );
    let tag = content.tag.clone().unwrap();
    assert!(
        content.version.date().is_some() && tag.starts_with('"') && tag.ends_with("-5\""),
        "{tag}"
    );
    let Data::Memory(region) = source.keep(content.data) else { panic!() };
    let Data::Memory(again) = source.find("/a b.txt").unwrap().data else { panic!() };
    assert!(Arc::ptr_eq(&region, &again));
    fs::write(&name, "and second").unwrap();
    let content = source.find("/a b.txt").unwrap();
    assert_eq!(text(&content, &mut source), "and second");
    assert_ne!(content.tag.unwrap(), tag);
    drop((region, again));
    assert_eq!(
        (source.memory.count_kept(), source.memory.held()),
        (0, 0),
        "what has changed is let go"
    );
    assert_eq!(source.find("/empty").unwrap().len, 0);
    assert_eq!(status(source.find("/other")), Status::NotFound);
    assert_eq!(status(source.find("/a b.txt/")), Status::NotFound);
    assert_eq!(status(source.find("/a b.txt/x")), Status::NotFound);
    assert_eq!(status(source.find(&format!("/{}", "x".repeat(300)))), Status::NotFound);
}

#[test]
fn folders_are_listed_or_have_a_page() {
    let (folder, memory) = (Folder::new("list"), memory(1 << 20));
    fs::create_dir(folder.0.join("in & out")).unwrap();
    fs::write(folder.0.join("in & out/<x>"), "x").unwrap();
    let mut source = Source::folder(memory, &folder.0).unwrap();
    let Err(Otherwise::Moved(to)) = source.find("/in & out") else { panic!() };
    assert_eq!(to, "/in%20%26%20out/");
    let listing = text(&source.find("/in & out/").unwrap(), &mut source);
    assert!(listing.contains("<a href=\"./%3Cx%3E\">&lt;x&gt;</a>"), "{listing}");
    assert!(text(&source.find("/").unwrap(), &mut source).contains("in%20%26%20out/"));
    fs::write(folder.0.join("index.html"), "<p>hello").unwrap();
    assert_eq!(text(&source.find("/").unwrap(), &mut source), "<p>hello");
}

#[test]
fn nothing_outside_of_the_folder_is_shown() {
    let (folder, outside, memory) =
        (Folder::new("inside"), Folder::new("outside"), memory(1 << 20));
    fs::write(outside.0.join("secret"), "s").unwrap();
    fs::write(outside.0.join("index.html"), "s").unwrap();
    symlink(outside.0.join("secret"), folder.0.join("link")).unwrap();
    symlink(outside.0.join("index.html"), folder.0.join("index.html")).unwrap();
    fs::write(folder.0.join("own"), "own").unwrap();
    symlink(folder.0.join("own"), folder.0.join("inner")).unwrap();
    symlink("/dev/zero", folder.0.join("zero")).unwrap();
    let mut source = Source::folder(memory, &folder.0).unwrap();
    assert_eq!(status(source.find("/link")), Status::Forbidden);
    assert_eq!(status(source.find("/zero")), Status::Forbidden);
    symlink("loop", folder.0.join("loop")).unwrap();
    assert_eq!(status(source.find("/loop")), Status::NotFound);
    assert_eq!(text(&source.find("/inner").unwrap(), &mut source), "own");
    // The index leads outside, so the folder is listed.
    assert!(text(&source.find("/").unwrap(), &mut source).contains("inner"));
    let again = self::memory(1 << 20);
    assert!(Source::folder(again, &folder.0.join("own")).is_err());
}

#[test]
fn what_takes_the_place_of_a_file_is_not_shown() {
    let (folder, outside, memory) = (Folder::new("raced"), Folder::new("beside"), memory(1 << 20));
    fs::create_dir(folder.0.join("deep")).unwrap();
    for file in [folder.0.join("deep/file"), outside.0.join("file")] {
        fs::write(file, "s").unwrap();
    }
    let mut source = Source::folder(memory, &folder.0).unwrap();
    let root = folder.0.canonicalize().unwrap();
    let place = root.join("deep/file");
    let is_refused = |source: &mut Source| {
        let found = source.file(&root, place.clone(), "");
        matches!(found, Err(Trouble::Otherwise(Otherwise::Refused(Status::Forbidden))))
    };
    assert!(!is_refused(&mut source));
    fs::remove_file(&place).unwrap();
    symlink(outside.0.join("file"), &place).unwrap();
    assert!(is_refused(&mut source));
    fs::remove_file(&place).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&place).status().unwrap().success());
    assert!(is_refused(&mut source), "nobody writes to it");
    fs::remove_dir_all(root.join("deep")).unwrap();
    symlink(&outside.0, root.join("deep")).unwrap();
    assert!(is_refused(&mut source), "a folder on the way");
}

#[test]
fn one_page_is_all_there_is() {
    let mut source = Source::page(memory(1 << 20), "knots".into());
    let content = source.find("/").unwrap();
    assert_eq!(
        (text(&content, &mut source).as_str(), content.media_type),
        ("knots", "text/plain; charset=utf-8")
    );
    assert_eq!(status(source.find("/x")), Status::NotFound);
    let html = Source::page(memory(1 << 20), "<p>knots".into()).find("/").unwrap().media_type;
    assert_eq!(html, "text/html; charset=utf-8");
}

/// Makes a file of `len` octets that ends with "end".
fn file(folder: &Folder, name: &str, len: u64) -> File {
    let file = File::create(folder.0.join(name)).unwrap();
    file.set_len(len).unwrap();
    file.write_all_at(b"end", len - 3).unwrap();
    file
}

#[test]
fn a_large_file_is_read_as_it_is_sent() {
    let (folder, memory) = (Folder::new("large"), memory(1 << 20));
    let file = file(&folder, "large", KEPT_FILE + 10);
    let mut source = Source::folder(memory, &folder.0).unwrap();
    let content = source.find("/large").unwrap();
    assert_eq!(content.len, KEPT_FILE + 10);
    let data = source.keep(content.data);
    let memory = &mut source.memory;
    assert_eq!(memory.held(), 0);
    let (region, at, len) = data.piece(memory, KEPT_FILE + 6, 4).unwrap();
    assert_eq!(region.to_vec(at, len).unwrap(), b"\0end");
    let (_, _, len) = data.piece(memory, 0, content.len).unwrap();
    assert_eq!(len as u64, PIECE);
    file.set_len(5).unwrap();
    let said = data.piece(memory, KEPT_FILE, 10).unwrap_err().to_string();
    assert!(said.ends_with("/large became shorter while it was sent"), "{said}");
}

#[test]
fn what_is_held_is_counted_until_the_last_has_let_go() {
    let (folder, memory) = (Folder::new("held"), memory(2 * KEPT_FILE));
    for name in ["a", "b", "c"] {
        file(&folder, name, KEPT_FILE);
    }
    settle();
    let mut source = Source::folder(memory, &folder.0).unwrap();
    let (a, _) = get(&mut source, "/a");
    assert!(matches!(get(&mut source, "/b"), (Data::Memory(_), 2)));
    // Nobody is sent the second, which gives way to the third; the first is older, but in use.
    let (c, kept) = get(&mut source, "/c");
    assert!(matches!((&a, &c, kept), (Data::Memory(_), Data::Memory(_), 2)));
    // Now everything is in use: the next one is read as it is sent, a little at a time.
    let (b, _) = get(&mut source, "/b");
    assert!(matches!(b, Data::File(_)));
    let memory = &mut source.memory;
    assert_eq!(memory.held(), 2 * KEPT_FILE);
    let (piece, _, len) = b.piece(memory, 0, KEPT_FILE).unwrap();
    assert!((len as u64) < PIECE && b.sends(memory, 8) == 1);
    assert_eq!(a.sends(memory, 8), 8, "it is there in any case");
    drop((piece, c));
    // What nobody is sent is no reason to be sparing.
    assert_eq!((b.sends(memory, 8), memory.piece()), (8, PIECE));
    assert!(matches!(get(&mut source, "/b"), (Data::Memory(_), 2)));
    drop(a);
    assert_eq!((source.memory.count_kept(), source.memory.sends(8)), (2, 8));
}

/// A file as it is sent, and how many are kept then.
fn get(source: &mut Source, path: &str) -> (Data, usize) {
    let data = source.find(path).unwrap().data;
    (source.keep(data), source.memory.count_kept())
}

#[test]
fn what_is_put_in_the_place_of_a_file_is_another_one() {
    let (folder, memory) = (Folder::new("replaced"), memory(1 << 20));
    let early = SystemTime::now() - Duration::from_secs(10);
    let put = |name: &str, text: &str| {
        fs::write(folder.0.join(name), text).unwrap();
        let file = File::options().write(true).open(folder.0.join(name)).unwrap();
        file.set_modified(early).unwrap();
        settle();
    };
    put("app.js", "old");
    let mut source = Source::folder(memory, &folder.0).unwrap();
    let before = source.find("/app.js").unwrap();
    assert!(matches!(source.keep(before.data), Data::Memory(_)));
    // Of the same length and time, as what is built reproducibly has them.
    put("new", "new");
    fs::rename(folder.0.join("new"), folder.0.join("app.js")).unwrap();
    let after = source.find("/app.js").unwrap();
    assert_eq!(text(&after, &mut source), "new");
    assert_ne!(before.tag, after.tag);
}

#[test]
fn a_file_is_shown_as_what_it_is_called() {
    let (folder, memory) = (Folder::new("called"), memory(1 << 20));
    fs::create_dir_all(folder.0.join("sub/index.html")).unwrap();
    fs::write(folder.0.join("data"), "{}").unwrap();
    symlink("data", folder.0.join("latest.json")).unwrap();
    symlink("data", folder.0.join("index.html")).unwrap();
    let mut source = Source::folder(memory, &folder.0).unwrap();
    let mut shown = |path: &str| source.find(path).unwrap().media_type;
    assert_eq!(shown("/data"), "application/octet-stream");
    assert_eq!(shown("/latest.json"), "application/json");
    assert_eq!(shown("/"), http::media_type(".html"));
    // What is no file is no page of its folder, which is listed then.
    let listing = source.find("/sub/").unwrap();
    assert!(text(&listing, &mut source).contains("index.html/"));
}

#[test]
fn all_who_ask_for_a_listing_are_sent_the_same_octets() {
    let (folder, memory) = (Folder::new("names"), memory(16 << 10));
    fs::write(folder.0.join("a"), "").unwrap();
    settle();
    let mut source = Source::folder(memory, &folder.0).unwrap();
    let ask = |source: &mut Source| match source.find("/").map(|content| content.data) {
        Ok(Data::Memory(region)) => region,
        other => panic!("{other:?}"),
    };
    // A second may end in between.
    assert!((0..10).any(|_| Arc::ptr_eq(&ask(&mut source), &ask(&mut source))));
    fs::write(folder.0.join("b"), "").unwrap();
    let third = source.find("/").unwrap();
    assert!(text(&third, &mut source).contains(">b</a>"));
    // There is no more than there is room for, however many are asked for.
    for number in 0..200 {
        fs::write(folder.0.join(format!("{number:0100}")), "").unwrap();
    }
    assert_eq!(status(source.find("/")), Status::Unavailable);
    assert!(source.memory.held() <= 16 << 10);
}

#[test]
fn what_there_is_too_little_of_comes_again() {
    let of = |number| status_of(&io::Error::from_raw_os_error(number));
    assert_eq!(of(libc::EMFILE), Status::Unavailable);
    assert_eq!(of(libc::ENOENT), Status::NotFound);
    assert_eq!(of(libc::EIO), Status::InternalError);
}

/// Where an adapter has less memory than counts as plenty, what is kept does not keep others from being sent.
#[test]
fn what_is_kept_gives_way_where_there_is_no_more() {
    let folder = Folder::new("full");
    for number in 0..20 {
        file(&folder, &number.to_string(), KEPT_FILE);
    }
    file(&folder, "large", 4 * KEPT_FILE);
    settle();
    let open = |link: String, bytes: usize| {
        let config = Config {
            address: Some([127, 0, 0, 1].into()),
            counters: false,
            arena_bytes: bytes,
            qpip: Some(quipu::qpip::QpipConfig::new(link.parse().unwrap())),
            ..Config::default()
        };
        quipu::qpip::Adapter::open_with(config).unwrap()
    };
    let owner = open("udp:127.0.0.1:0".into(), 1 << 20);
    let name = format!("files-{}", std::process::id());
    let _sharer = owner.share(&name).unwrap();
    let tenant = open(format!("share:{name}"), 8 << 20);
    let memory = Memory::new(&tenant.protection_domain().unwrap());
    let mut source = Source::folder(memory, &folder.0).unwrap();
    for number in 0..20 {
        get(&mut source, &format!("/{number}"));
    }
    let large = source.find("/large").unwrap();
    let mut under_way = Vec::new();
    for piece in 0..8 {
        let (region, _, len) = large.data.piece(&mut source.memory, piece * PIECE, PIECE).unwrap();
        assert_eq!(len as u64, PIECE);
        under_way.push(region);
    }
}
