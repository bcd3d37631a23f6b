//! The rules of the process: those of the file that `LIBSDP_CONFIG_FILE` names.

use std::net::SocketAddr;
use std::sync::OnceLock;

use quipu_sdp::rules::{Role, Rules, Transport};

struct Settings {
    rules: Rules,
    program: String,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

fn load() -> Settings {
    let file = std::env::current_exe().ok();
    let name = file.as_deref().and_then(|file| file.file_name());
    let program = name.map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let is_simple = std::env::var_os("SIMPLE_LIBSDP").is_some();
    let rules = match std::env::var_os("LIBSDP_CONFIG_FILE") {
        _ if is_simple => Rules::everything(),
        None => Rules::default(),
        Some(path) => {
            let text = std::fs::read_to_string(&path).map_err(|error| error.to_string());
            let rules = text.and_then(|text| Rules::parse(&text).map_err(|e| e.to_string()));
            rules.unwrap_or_else(|error| {
                let path = path.display();
                eprintln!(
                    "quipu: {path}: {error}; no socket goes over SDP by rule: correct the file, or \
                     unset LIBSDP_CONFIG_FILE"
                );
                Rules::default()
            })
        }
    };
    Settings { rules, program }
}

fn settings() -> &'static Settings {
    SETTINGS.get_or_init(load)
}

/// Whether there are any.
pub(crate) fn any() -> bool {
    !settings().rules.is_empty()
}

/// What carries a socket with this role at this address.
pub(crate) fn choose(role: Role, address: SocketAddr) -> Transport {
    let Settings { rules, program } = settings();
    rules.choose(role, program, address)
}
