//! A folder as clients see it.

use std::os::unix::fs::symlink;

use quipu::{Config, Device};

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

fn domain() -> ProtectionDomain {
    let config =
        Config { address: Some([127, 0, 0, 1].into()), counters: false, ..Config::default() };
    Device::open(config).unwrap().protection_domain().unwrap()
}

fn text(content: &Content, pd: &ProtectionDomain) -> String {
    if content.len == 0 {
        return String::new();
    }
    let (region, at, len) = content.data.piece(pd, 0, content.len).unwrap();
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
    let (folder, pd) = (Folder::new("change"), domain());
    let name = folder.0.join("a b.txt");
    fs::write(&name, "first").unwrap();
    fs::write(folder.0.join("empty"), "").unwrap();
    let mut source = Source::folder(&pd, &folder.0).unwrap();
    let content = source.find("/a b.txt").unwrap();
    assert_eq!(
        (text(&content, &pd).as_str(), content.media_type),
        ("first", http::media_type(".txt"))
    );
    assert!(content.changed.is_some());
    let Data::Memory(region) = &content.data else { panic!() };
    let Data::Memory(again) = source.find("/a b.txt").unwrap().data else { panic!() };
    assert!(Arc::ptr_eq(region, &again));
    fs::write(&name, "and second").unwrap();
    assert_eq!(text(&source.find("/a b.txt").unwrap(), &pd), "and second");
    assert_eq!(source.kept_bytes, 10);
    assert_eq!(source.find("/empty").unwrap().len, 0);
    assert_eq!(status(source.find("/other")), Status::NotFound);
    assert_eq!(status(source.find("/a b.txt/")), Status::NotFound);
    assert_eq!(status(source.find("/a b.txt/x")), Status::NotFound);
    assert_eq!(status(source.find(&format!("/{}", "x".repeat(300)))), Status::NotFound);
}

#[test]
fn folders_are_listed_or_have_a_page() {
    let (folder, pd) = (Folder::new("list"), domain());
    fs::create_dir(folder.0.join("in & out")).unwrap();
    fs::write(folder.0.join("in & out/<x>"), "x").unwrap();
    let mut source = Source::folder(&pd, &folder.0).unwrap();
    let Err(Otherwise::Moved(to)) = source.find("/in & out") else { panic!() };
    assert_eq!(to, "/in%20%26%20out/");
    let listing = text(&source.find("/in & out/").unwrap(), &pd);
    assert!(listing.contains("<a href=\"./%3Cx%3E\">&lt;x&gt;</a>"), "{listing}");
    assert!(text(&source.find("/").unwrap(), &pd).contains("in%20%26%20out/"));
    fs::write(folder.0.join("index.html"), "<p>hello").unwrap();
    assert_eq!(text(&source.find("/").unwrap(), &pd), "<p>hello");
}

#[test]
fn nothing_outside_of_the_folder_is_shown() {
    let (folder, outside, pd) = (Folder::new("inside"), Folder::new("outside"), domain());
    fs::write(outside.0.join("secret"), "s").unwrap();
    fs::write(outside.0.join("index.html"), "s").unwrap();
    symlink(outside.0.join("secret"), folder.0.join("link")).unwrap();
    symlink(outside.0.join("index.html"), folder.0.join("index.html")).unwrap();
    fs::write(folder.0.join("own"), "own").unwrap();
    symlink(folder.0.join("own"), folder.0.join("inner")).unwrap();
    symlink("/dev/zero", folder.0.join("zero")).unwrap();
    let mut source = Source::folder(&pd, &folder.0).unwrap();
    assert_eq!(status(source.find("/link")), Status::Forbidden);
    assert_eq!(status(source.find("/zero")), Status::Forbidden);
    assert_eq!(text(&source.find("/inner").unwrap(), &pd), "own");
    // The index leads outside, so the folder is listed.
    assert!(text(&source.find("/").unwrap(), &pd).contains("inner"));
    assert!(Source::folder(&pd, &folder.0.join("own")).is_err());
}

#[test]
fn one_page_is_all_there_is() {
    let pd = domain();
    let mut source = Source::page(&pd, "knots".into());
    let content = source.find("/").unwrap();
    assert_eq!(
        (text(&content, &pd).as_str(), content.media_type),
        ("knots", "text/plain; charset=utf-8")
    );
    assert_eq!(status(source.find("/x")), Status::NotFound);
    let html = Source::page(&pd, "<p>knots".into()).find("/").unwrap().media_type;
    assert_eq!(html, "text/html; charset=utf-8");
}

#[test]
fn a_large_file_is_read_as_it_is_sent() {
    let (folder, pd) = (Folder::new("large"), domain());
    let name = folder.0.join("large");
    let file = File::create(&name).unwrap();
    file.set_len(KEPT_FILE + 10).unwrap();
    file.write_all_at(b"end", KEPT_FILE + 7).unwrap();
    let content = Source::folder(&pd, &folder.0).unwrap().find("/large").unwrap();
    assert_eq!(content.len, KEPT_FILE + 10);
    let (region, at, len) = content.data.piece(&pd, KEPT_FILE + 6, 4).unwrap();
    assert_eq!(region.to_vec(at, len).unwrap(), b"\0end");
    let (_, _, len) = content.data.piece(&pd, 0, content.len).unwrap();
    assert_eq!(len as u64, super::super::serve::FILE_PIECE);
    file.set_len(5).unwrap();
    assert!(content.data.piece(&pd, KEPT_FILE, 10).is_err());
}
