//! Connection management: bytes of a hostile peer in streams and datagrams, in any state, in pieces,
//! among calls of a program that does what it likes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use quipu_cm::{Action, Cm, Config, IdKey, Loss, Param, PortSpace, Refusal, StreamKey};
use quipu_iwarp::{Initiator, Params};
use quipu_wire::cm::{Frame, Lookup, Offer, Setup};

/// What the input is read as.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (&byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(byte)
    }

    fn bytes(&mut self) -> &'a [u8] {
        let len = usize::from(self.byte().unwrap_or(0)).min(self.0.len());
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        bytes
    }
}

/// Whatever is read can be written, and is then the same.
fn round_trips(bytes: &[u8]) {
    if let Ok(setup) = Setup::parse(bytes) {
        let again = setup.to_bytes();
        assert_eq!(Setup::parse(&again), Ok(setup));
    }
    if let Ok(lookup) = Lookup::parse(bytes) {
        let again = lookup.to_bytes();
        assert_eq!(Lookup::parse(&again), Ok(lookup));
    }
    if let Ok(Some((frame, _))) = Frame::parse(bytes) {
        assert_eq!(Frame::parse(&frame.to_bytes()), Ok(Some((frame, 4))));
    }
}

fn request(data: &[u8]) -> Vec<u8> {
    let offer = Offer { port_space: 0x0106, qp_type: 2, path_mtu: 5, ..Offer::default() };
    let data = &data[..data.len().min(56)];
    let setup = Setup::Request(offer, data).to_bytes();
    let params = Params { revision: 1, crc: true, enhanced: None };
    let mut initiator = Initiator::new(params, &setup).expect("short");
    let mut out = [0; 600];
    let len = initiator.poll_transmit(&mut out);
    out[..len].to_vec()
}

fuzz_target!(|input: &[u8]| {
    round_trips(input);
    let mut input = Input(input);
    let config = Config { half_open: 4, half_open_per_address: 3, ..Config::default() };
    let mut cm = Cm::new(config);
    let channel = cm.create_channel();
    let address = |last: u8| std::net::SocketAddr::from(([10, 0, 0, last], 5000));
    let mut ids: Vec<IdKey> = Vec::new();
    let mut streams: Vec<StreamKey> = Vec::new();
    for space in [PortSpace::Tcp, PortSpace::Udp] {
        let id = cm.create_id(channel, space, 2, 0).expect("a channel");
        cm.bind(id, address(1)).expect("unbound");
        cm.listen(id, 3).expect("bound");
        ids.push(id);
    }
    let (tcp, udp) = (ids[0], ids[1]);
    let mut now = 0;
    while let Some(what) = input.byte() {
        let pick = usize::from(input.byte().unwrap_or(0));
        let id = ids[pick % ids.len()];
        let stream = (!streams.is_empty()).then(|| streams[pick % streams.len()]);
        let param = Param { private_data: vec![7; pick % 60], ..Param::default() };
        // What the program does may be refused; that is its affair.
        let _ = match what % 16 {
            0 => cm.handle_accepted(now, tcp, address(1), address(pick as u8)).map(|stream| {
                streams.push(stream);
            }),
            1 => stream.map(|stream| cm.handle_bytes(now, stream, input.bytes())),
            2 => stream.map(|stream| cm.handle_bytes(now, stream, &request(input.bytes()))),
            3 => stream.map(|stream| cm.handle_lost(now, stream, Loss::Closed)),
            4 => Some(cm.handle_datagram(udp, address(1), address(pick as u8), input.bytes())),
            5 => cm.accept(now, id, Some(&param)).ok(),
            6 => cm.reject(id, Refusal::Consumer, &param.private_data).ok(),
            7 => cm.disconnect(now, id).ok(),
            8 => cm.establish(id).ok(),
            9 => cm.destroy_id(id).ok().filter(|_| ids.len() > 2).map(drop),
            10 => {
                now += pick as u64 * 100_000_000;
                cm.handle_timeout(now);
                None
            }
            11 => {
                let space = if pick % 2 == 0 { PortSpace::Tcp } else { PortSpace::Udp };
                cm.create_id(channel, space, 2, 0).ok().map(|id| {
                    let _ = cm.resolved(id, address(9), Ok(address(1)));
                    let _ = cm.resolve_route(id);
                    let _ = cm.connect(now, id, &param);
                    ids.push(id);
                })
            }
            12 => cm.connect_params(id).ok().map(|_| ()),
            13 => Some(cm.handle_datagram(id, address(1), address(9), input.bytes())),
            14 => stream.map(|stream| cm.handle_reached(now, stream)),
            _ => cm.take_event(channel).ok().flatten().map(|event| ids.push(event.id)),
        };
        while let Some(action) = cm.poll_action() {
            if let Action::Connect { stream, .. } = action {
                streams.push(stream);
            }
        }
        let load = cm.load();
        assert!(load.half_open <= 4, "{load:?}");
        assert!(load.deadlines <= load.ids + load.half_open, "{load:?}");
        assert!(load.streams <= load.ids + load.half_open, "{load:?}");
        ids.truncate(256);
    }
});
