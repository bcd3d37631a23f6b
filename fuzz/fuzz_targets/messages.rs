//! Payloads of fixed layout: what is accepted survives being written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quipu_iwarp::wire::control::Control;
use quipu_iwarp::wire::ddp::Header;
use quipu_iwarp::wire::hello::Hello;
use quipu_iwarp::wire::rdmap::{
    AtomicRequest, AtomicResponse, FlushRequest, Immediate, Opcode, ReadRequest,
};
use quipu_iwarp::wire::terminate::Terminate;
use quipu_iwarp::wire::{Payload, WireError};

fn stable<P: Payload + PartialEq + std::fmt::Debug>(
    parse: impl Fn(&[u8]) -> Result<P, WireError>,
    bytes: &[u8],
) {
    if let Ok(value) = parse(bytes) {
        let mut out = vec![0; value.wire_len()];
        value.emit(&mut out);
        assert_eq!(parse(&out), Ok(value));
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((&which, bytes)) = input.split_first() else {
        return;
    };
    match which % 9 {
        0 => stable(Control::parse, bytes),
        1 => stable(Terminate::parse, bytes),
        2 => stable(ReadRequest::parse, bytes),
        3 => stable(AtomicRequest::parse, bytes),
        4 => stable(AtomicResponse::parse, bytes),
        5 => stable(Immediate::parse, bytes),
        8 => stable(FlushRequest::parse, bytes),
        6 => {
            if let Ok(hello) = Hello::parse(bytes) {
                assert_eq!(Hello::parse(&hello.to_bytes()), Ok(hello));
            }
        }
        _ => {
            if let Ok(header) = Header::parse(bytes) {
                let mut out = vec![0; header.wire_len()];
                header.emit(&mut out);
                assert_eq!(Header::parse(&out), Ok(header));
            }
            let _ = bytes.first().map(|&octet| Opcode::parse(octet));
        }
    }
});
