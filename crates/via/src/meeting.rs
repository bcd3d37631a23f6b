//! Which request for a connection meets which wait.

use crate::address::NetAddress;
use crate::message::Request;

/// What a process waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Requests for a discriminator (`VipConnectWait`).
    Client {
        /// The discriminator.
        discriminator: Vec<u8>,
    },
    /// The peer that requests from its side, too (`VipConnectPeerRequest`).
    Peer {
        /// The own address.
        local: NetAddress,
        /// The peer's.
        remote: NetAddress,
        /// The own request's number.
        nonce: u64,
    },
}

impl Wait {
    /// The discriminator at which it listens.
    pub fn discriminator(&self) -> &[u8] {
        match self {
            Self::Client { discriminator } => discriminator,
            Self::Peer { local, .. } => &local.discriminator,
        }
    }

    /// Whether a request is meant for it.
    pub fn meets(&self, request: &Request) -> bool {
        match self {
            Self::Client { discriminator } => {
                !request.is_peer && request.remote.discriminator == *discriminator
            }
            Self::Peer { local, remote, nonce } => {
                request.is_peer
                    && request.local == *remote
                    && request.remote == *local
                    && initiates((&request.local, request.nonce), (local, *nonce))
            }
        }
    }
}

/// Of two peers that request from each other, whether the first one opens the connection: the one with the
/// smaller address, then the one with the smaller number.
pub fn initiates(one: (&NetAddress, u64), other: (&NetAddress, u64)) -> bool {
    one < other
}

/// Whether a peer knows from the addresses alone that it does not open the connection.
pub fn only_listens(local: &NetAddress, remote: &NetAddress) -> bool {
    local > remote
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attributes::Attributes;
    use crate::codes::Reliability;
    use crate::message::{ENDPOINT_LEN, End};

    fn address(host: &str, discriminator: &[u8]) -> NetAddress {
        NetAddress { host: host.parse().unwrap(), discriminator: discriminator.to_vec() }
    }

    fn request(is_peer: bool, local: &NetAddress, remote: &NetAddress, nonce: u64) -> Request {
        let attributes = Attributes {
            reliability: Reliability::Delivery,
            max_transfer: 1,
            qos: 0,
            rdma_write: false,
            rdma_read: false,
        };
        let (local, remote) = (local.clone(), remote.clone());
        let end = End { attributes, endpoint: [0; ENDPOINT_LEN] };
        Request { is_peer, nonce, timeout_ms: 1, local, remote, end }
    }

    #[test]
    fn a_client_meets_a_wait_with_equal_bytes() {
        let wait = Wait::Client { discriminator: vec![1, 2] };
        let local = address("10.0.0.1", b"anything");
        for (discriminator, meets) in [(&[1, 2][..], true), (&[1], false), (&[1, 2, 0], false)] {
            let remote = address("10.0.0.2", discriminator);
            assert_eq!(wait.meets(&request(false, &local, &remote, 1)), meets);
            assert!(!wait.meets(&request(true, &local, &remote, 1)));
        }
    }

    #[test]
    fn crossing_requests_of_peers_make_one_connection() {
        let (a, b) = (address("10.0.0.1", b"x"), address("10.0.0.2", b"y"));
        let wait = |local: &NetAddress, remote: &NetAddress, nonce| Wait::Peer {
            local: local.clone(),
            remote: remote.clone(),
            nonce,
        };
        assert!(wait(&b, &a, 5).meets(&request(true, &a, &b, 9)));
        assert!(!wait(&a, &b, 9).meets(&request(true, &b, &a, 5)));
        assert!(only_listens(&b, &a) && !only_listens(&a, &b) && !only_listens(&a, &a));
        // Two processes with the same address: the number decides, and no process meets itself.
        assert!(wait(&a, &a, 5).meets(&request(true, &a, &a, 4)));
        assert!(!wait(&a, &a, 4).meets(&request(true, &a, &a, 5)));
        assert!(!wait(&a, &a, 5).meets(&request(true, &a, &a, 5)));
        let c = address("10.0.0.3", b"y");
        assert!(!wait(&b, &c, 5).meets(&request(true, &a, &b, 1)));
        assert!(!wait(&b, &a, 5).meets(&request(false, &a, &b, 1)));
    }
}
