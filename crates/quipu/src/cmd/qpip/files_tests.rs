//! A folder as clients see it.

use std::os::unix::fs::symlink;

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

fn text(content: &Content, memory: &Memory) -> String {
    if content.len == 0 {
        return String::new();
    }
    let (region, at, len) = content.data.piece(memory, 0, content.len).unwrap();
    String::from_utf8(region.to_vec(at, len).unwrap()).unwrap()
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
    let mut source = Source::folder(&memory, &folder.0).unwrap();
    assert_eq!(source.find("/a b.txt").unwrap().version.date(), None, "it may change again");
    let file = fs::File::options().write(true).open(&name).unwrap();
    file.set_modified(SystemTime::now() - std::time::Duration::from_secs(10)).unwrap();
    let content = source.find("/a b.txt").unwrap();
    assert_eq!(
        (text(&content, &memory).as_str(), content.media_type),
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
    assert_eq!(text(&content, &memory), "and second");
    assert_ne!(content.tag.unwrap(), tag);
    drop((region, again));
    assert_eq!((source.kept.len(), memory.held()), (0, 0), "what has changed is let go");
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
    let mut source = Source::folder(&memory, &folder.0).unwrap();
    let Err(Otherwise::Moved(to)) = source.find("/in & out") else { panic!() };
    assert_eq!(to, "/in%20%26%20out/");
    let listing = text(&source.find("/in & out/").unwrap(), &memory);
    assert!(listing.contains("<a href=\"./%3Cx%3E\">&lt;x&gt;</a>"), "{listing}");
    assert!(text(&source.find("/").unwrap(), &memory).contains("in%20%26%20out/"));
    fs::write(folder.0.join("index.html"), "<p>hello").unwrap();
    assert_eq!(text(&source.find("/").unwrap(), &memory), "<p>hello");
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
    let mut source = Source::folder(&memory, &folder.0).unwrap();
    assert_eq!(status(source.find("/link")), Status::Forbidden);
    assert_eq!(status(source.find("/zero")), Status::Forbidden);
    symlink("loop", folder.0.join("loop")).unwrap();
    assert_eq!(status(source.find("/loop")), Status::NotFound);
    assert_eq!(text(&source.find("/inner").unwrap(), &memory), "own");
    // The index leads outside, so the folder is listed.
    assert!(text(&source.find("/").unwrap(), &memory).contains("inner"));
    assert!(Source::folder(&memory, &folder.0.join("own")).is_err());
}

#[test]
fn what_takes_the_place_of_a_file_is_not_shown() {
    let (folder, outside, memory) = (Folder::new("raced"), Folder::new("beside"), memory(1 << 20));
    fs::create_dir(folder.0.join("deep")).unwrap();
    for file in [folder.0.join("deep/file"), outside.0.join("file")] {
        fs::write(file, "s").unwrap();
    }
    let mut source = Source::folder(&memory, &folder.0).unwrap();
    let root = folder.0.canonicalize().unwrap();
    let place = root.join("deep/file");
    let is_refused = |source: &mut Source| {
        let found = source.file(&root, place.clone());
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
    let memory = memory(1 << 20);
    let mut source = Source::page(&memory, "knots".into());
    let content = source.find("/").unwrap();
    assert_eq!(
        (text(&content, &memory).as_str(), content.media_type),
        ("knots", "text/plain; charset=utf-8")
    );
    assert_eq!(status(source.find("/x")), Status::NotFound);
    let html = Source::page(&memory, "<p>knots".into()).find("/").unwrap().media_type;
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
    let mut source = Source::folder(&memory, &folder.0).unwrap();
    let content = source.find("/large").unwrap();
    assert_eq!(content.len, KEPT_FILE + 10);
    let data = source.keep(content.data);
    assert_eq!(memory.held(), 0);
    let (region, at, len) = data.piece(&memory, KEPT_FILE + 6, 4).unwrap();
    assert_eq!(region.to_vec(at, len).unwrap(), b"\0end");
    let (_, _, len) = data.piece(&memory, 0, content.len).unwrap();
    assert_eq!(len as u64, PIECE);
    file.set_len(5).unwrap();
    let said = data.piece(&memory, KEPT_FILE, 10).unwrap_err().to_string();
    assert!(said.ends_with("/large has become shorter while it was sent"), "{said}");
}

#[test]
fn what_is_held_is_counted_until_the_last_has_let_go() {
    let (folder, memory) = (Folder::new("held"), memory(2 * KEPT_FILE));
    for name in ["a", "b", "c"] {
        file(&folder, name, KEPT_FILE);
    }
    let mut source = Source::folder(&memory, &folder.0).unwrap();
    let mut get = |path: &str| {
        let data = source.find(path).unwrap().data;
        (source.keep(data), source.kept.len())
    };
    let (a, _) = get("/a");
    assert!(matches!(get("/b"), (Data::Memory(_), 2)));
    // Nobody is sent the second, which gives way to the third; the first is older, but in use.
    let (c, kept) = get("/c");
    assert!(matches!((&a, &c, kept), (Data::Memory(_), Data::Memory(_), 2)));
    // Now everything is in use: the next one is read as it is sent, a little at a time.
    let (b, _) = get("/b");
    assert!(matches!(b, Data::File(_)));
    assert_eq!(memory.held(), 2 * KEPT_FILE);
    let (piece, _, len) = b.piece(&memory, 0, KEPT_FILE).unwrap();
    assert!((len as u64) < PIECE && memory.sends(8) == 1);
    drop((piece, c));
    assert!(matches!(get("/b"), (Data::Memory(_), 2)));
    drop(a);
    drop(source);
    assert_eq!((memory.held(), memory.sends(8)), (0, 8));
}
