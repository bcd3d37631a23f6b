//! The device as programs have it, for commands that look at it and leave nothing behind.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use quipu_host::Config;

use super::DeviceOptions;
use super::faults::{Flaw, check_plan};

impl DeviceOptions {
    /// The settings of a look: no captures, logs and faults.
    ///
    /// # Errors
    ///
    /// In words: what would refuse programs the device, of these, too.
    pub(super) fn to_look_at(&self) -> Result<Config, String> {
        let config = Config::from_env().map_err(|error| error.to_string())?;
        if let Some(plan) = &config.faults {
            check_plan(plan, config.fault_replay.as_deref())
                .map_err(|(Flaw::Unread(why) | Flaw::Wrong(why))| why)?;
        }
        let capture = config.capture.as_ref().map(|capture| &*capture.path);
        for (variable, path) in [
            ("QUIPU_PCAP", capture),
            ("QUIPU_FAULT_LOG", config.fault_log.as_deref()),
            ("QUIPU_STRICT_LOG", config.strict_log.as_deref()),
        ] {
            let Some(path) = path else { continue };
            try_output(path).map_err(|error| {
                let place = path.display();
                format!("cannot write to {place}: {error}; choose another file with {variable}, or unset it")
            })?;
        }
        Ok(Config {
            address: self.address.clone().or(config.address),
            capture: None,
            faults: None,
            fault_log: None,
            fault_replay: None,
            strict: None,
            strict_log: None,
            ..config
        })
    }
}

/// Whether a program could write to `path`, or make it. Nothing is left there.
fn try_output(path: &Path) -> io::Result<()> {
    let found = fs::metadata(path);
    match &found {
        Ok(file) if file.is_file() => return File::options().append(true).open(path).map(drop),
        // A terminal or a pipe, to open which may be heard at its other end.
        Ok(other) if !other.is_dir() => return Ok(()),
        _ => {}
    }
    let name = format!(".quipu-{}", std::process::id());
    let file = if found.is_ok() { path.join(name) } else { path.to_owned() };
    File::create_new(&file)?;
    fs::remove_file(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_tried_and_left_as_it_was() {
        let folder = std::env::temp_dir().join(format!("quipu-looking-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let file = folder.join("capture");
        for place in [&folder, &file] {
            try_output(place).unwrap();
            assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        }
        fs::write(&file, "kept").unwrap();
        try_output(&file).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"kept");
        let missing = try_output(&folder.join("none/capture")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        fs::remove_dir_all(&folder).unwrap();
    }
}
