//! Captured packets, read back.

use std::collections::HashMap;

fn u32_le(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

fn u32_be(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// The packets of a file, and their comments.
pub fn packets(file: &[u8]) -> Vec<(Vec<u8>, String)> {
    let (mut packets, mut at) = (Vec::new(), 0);
    while at < file.len() {
        let (kind, length) = (u32_le(file, at), u32_le(file, at + 4));
        let block = &file[at..at + length];
        if kind == 6 {
            let captured = u32_le(block, 20);
            let mut option = 28 + captured.next_multiple_of(4);
            let mut comment = String::new();
            while option + 4 <= length - 4 {
                let code = u16::from_le_bytes([block[option], block[option + 1]]);
                let len = usize::from(u16::from_le_bytes([block[option + 2], block[option + 3]]));
                if code == 1 {
                    comment =
                        String::from_utf8(block[option + 4..option + 4 + len].to_vec()).unwrap();
                }
                option += 4 + len.next_multiple_of(4);
            }
            packets.push((block[28..28 + captured].to_vec(), comment));
        }
        at += length;
    }
    packets
}

/// The bytes of each direction of the only connection, by the port that they come from, after a check of
/// handshake, order and end.
pub fn streams(packets: &[(Vec<u8>, String)]) -> Vec<Vec<u8>> {
    let mut ports = Vec::new();
    let mut next: HashMap<u16, u32> = HashMap::new();
    let mut bytes: HashMap<u16, Vec<u8>> = HashMap::new();
    for (number, (packet, _)) in packets.iter().enumerate() {
        let tcp = if packet[0] >> 4 == 4 { &packet[20..] } else { &packet[40..] };
        let port = u16::from_be_bytes([tcp[0], tcp[1]]);
        let (seq, ack, flags) = (u32_be(tcp, 4), u32_be(tcp, 8), tcp[13]);
        let payload = &tcp[usize::from(tcp[12] >> 4) * 4..];
        match number {
            0 => assert_eq!(flags, 0x02),
            1 => assert_eq!(flags, 0x12),
            2 => assert_eq!(flags, 0x10),
            _ => {}
        }
        if flags & 0x02 != 0 {
            ports.push(port);
            next.insert(port, seq);
            bytes.insert(port, Vec::new());
        }
        assert_eq!(next[&port], seq, "packet {number}");
        let other = u16::from_be_bytes([tcp[2], tcp[3]]);
        if flags & 0x10 != 0 {
            assert_eq!(next[&other], ack, "packet {number}");
        }
        let takes = payload.len() as u32 + u32::from(flags & 0x03 != 0);
        next.insert(port, seq.wrapping_add(takes));
        bytes.get_mut(&port).unwrap().extend_from_slice(payload);
    }
    assert_eq!(ports.len(), 2, "one connection");
    ports.iter().map(|port| bytes.remove(port).unwrap()).collect()
}
