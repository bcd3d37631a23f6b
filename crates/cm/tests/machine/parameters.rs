//! What the two programs tell each other with their messages: private data, options, limits of queue pairs.

use crate::common::{Pair, param};
use quipu_cm::{CallError, Ece, EventKind, Param, PortSpace, Refusal};

#[test]
fn queue_pairs_get_what_fits_the_other_side() {
    let mut pair = Pair::default();
    pair.listen(PortSpace::Tcp, 5000, 0);
    let asked = Param {
        responder_resources: 4,
        initiator_depth: 200,
        retry_count: 9,
        rnr_retry_count: 3,
        qpn: 0xff00_0011,
        ..Param::default()
    };
    let active = pair.resolve(PortSpace::Tcp, 5000);
    pair.nodes[0].cm.options(active).unwrap().tos = Some(0x68);
    assert!(pair.nodes[0].cm.connect_params(active).is_err(), "no peer yet");
    let init = pair.nodes[0].cm.init_params(active).unwrap();
    assert!(!init.remote_write && !init.remote_read, "as the kernel has it");
    pair.nodes[0].cm.connect(1, active, &asked).unwrap();
    pair.run();
    let passive = pair.expect(1, EventKind::ConnectRequest).id;
    let answer = Param {
        responder_resources: 16,
        initiator_depth: 4,
        rnr_retry_count: 7,
        qpn: 0x22,
        ..Param::default()
    };
    pair.nodes[1].cm.accept(1, passive, Some(&answer)).unwrap();
    pair.run();
    pair.expect(0, EventKind::ConnectResponse);
    let a = pair.nodes[0].cm.connect_params(active).unwrap();
    let b = pair.nodes[1].cm.connect_params(passive).unwrap();
    assert_eq!((a.dest_qpn, b.dest_qpn), (0x22, 0x11));
    assert_eq!((a.sq_psn, a.rq_psn), (b.rq_psn, b.sq_psn));
    assert_ne!(a.sq_psn, b.sq_psn);
    assert_eq!((a.max_rd_atomic, b.max_dest_rd_atomic), (16, 16));
    assert_eq!((b.max_rd_atomic, a.max_dest_rd_atomic), (4, 4));
    assert_eq!((a.retry_count, b.retry_count), (7, 7), "at most seven");
    assert_eq!((a.rnr_retry, b.rnr_retry), (7, 3));
    // The side whose peer gives up after three waits long.
    assert_eq!((a.min_rnr_timer, b.min_rnr_timer), (0, 12));
    assert_eq!((a.path.traffic_class, b.path.traffic_class), (0x68, 0x68));
    assert_eq!((a.path.dgid[15], b.path.dgid[15]), (2, 1));
    assert!(a.remote_write && a.remote_read);
}

#[test]
fn rules_by_service_id_give_both_ends_their_level() {
    for (tos, level) in [(None, 5), (Some(0x68), 3)] {
        let mut pair = Pair::default();
        for node in &mut pair.nodes {
            node.cm
                .set_levels(vec![(0x0106_0000 + 4999..=0x0106_0000 + 5000, 5), (0..=u64::MAX, 1)]);
        }
        pair.listen(PortSpace::Tcp, 5000, 0);
        let active = pair.resolve(PortSpace::Tcp, 5000);
        pair.nodes[0].cm.options(active).unwrap().tos = tos;
        assert_eq!(pair.nodes[0].cm.route(active).unwrap().service_level, level);
        let param = Param { qpn: 0x11, ..Param::default() };
        pair.nodes[0].cm.connect(1, active, &param).unwrap();
        pair.run();
        let passive = pair.expect(1, EventKind::ConnectRequest).id;
        pair.nodes[1].cm.accept(1, passive, Some(&param)).unwrap();
        pair.run();
        pair.expect(0, EventKind::ConnectResponse);
        for (node, id) in pair.nodes.iter_mut().zip([active, passive]) {
            let path = node.cm.connect_params(id).unwrap().path;
            assert_eq!((path.service_level, path.traffic_class), (level, tos.unwrap_or(0)));
        }
    }
}

#[test]
fn the_reply_says_how_many_reads_go_either_way() {
    // Asked for, answered, and what holds at the side that asked: answers, and reads outstanding.
    for (asked, answered, holds) in [
        ([16, 16], [1, 2], [2, 1]),
        ([3, 2], [16, 16], [16, 2]),
        ([0, 0], [4, 1], [1, 0]),
        ([4, 4], [0, 0], [0, 0]),
    ] {
        let limits = |[responder_resources, initiator_depth]: [u8; 2]| Param {
            responder_resources,
            initiator_depth,
            ..Param::default()
        };
        let mut pair = Pair::default();
        pair.listen(PortSpace::Tcp, 5000, 0);
        let active = pair.connect(5000, &limits(asked));
        let passive = pair.expect(1, EventKind::ConnectRequest).id;
        let before = pair.nodes[1].cm.connect_params(passive).unwrap();
        assert_eq!([before.max_rd_atomic, before.max_dest_rd_atomic], asked);
        pair.nodes[1].cm.accept(1, passive, Some(&limits(answered))).unwrap();
        pair.run();
        pair.expect(0, EventKind::ConnectResponse);
        let told = pair.nodes[0].cm.connect_params(active).unwrap();
        assert_eq!([told.max_dest_rd_atomic, told.max_rd_atomic], holds);
        assert_eq!(
            pair.nodes[0].cm.init_params(active).unwrap().remote_read,
            asked[0] + holds[0] > 0
        );
    }
}

#[test]
fn options_of_vendors_reach_the_other_program() {
    let mut pair = Pair::default();
    pair.listen(PortSpace::Tcp, 5000, 0);
    let [ours, theirs] = [1, 2].map(|options| Ece { vendor_id: 0x51f0, options });
    let with = |ece| Param { ece, ..param(b"e") };
    pair.connect(5000, &with(ours));
    let request = pair.expect(1, EventKind::ConnectRequest);
    assert_eq!(request.peer.ece, ours);
    pair.nodes[1].cm.accept(1, request.id, Some(&with(theirs))).unwrap();
    pair.run();
    let response = pair.expect(0, EventKind::ConnectResponse);
    assert_eq!(response.peer.ece, theirs);
    // The program that has asked does not like them.
    pair.nodes[0].cm.reject(response.id, Refusal::VendorOption, &[]).unwrap();
    pair.run();
    assert_eq!(pair.expect(1, EventKind::Rejected).status, 35);

    pair.connect(5000, &param(&[]));
    let request = pair.expect(1, EventKind::ConnectRequest);
    assert_eq!(request.peer.ece, Ece::default());
    pair.nodes[1].cm.reject(request.id, Refusal::VendorOption, b"no").unwrap();
    pair.run();
    let rejected = pair.expect(0, EventKind::Rejected);
    assert_eq!((rejected.status, &rejected.private_data[..2]), (35, &b"no"[..]));
    pair.expect_nothing();
}

#[test]
fn private_data_have_the_limits_of_infiniband() {
    let mut pair = Pair::default();
    pair.listen(PortSpace::Tcp, 5000, 0);
    let active = pair.resolve(PortSpace::Tcp, 5000);
    let too_long = pair.nodes[0].cm.connect(1, active, &param(&[1; 57]));
    assert!(matches!(too_long, Err(CallError::Invalid(_))));
    pair.nodes[0].cm.connect(1, active, &param(&[1; 56])).unwrap();
    pair.run();
    let request = pair.expect(1, EventKind::ConnectRequest);
    assert_eq!(*request.private_data, [1; 56]);
    let passive = request.id;
    assert!(pair.nodes[1].cm.accept(1, passive, Some(&param(&[2; 197]))).is_err());
    assert!(pair.nodes[1].cm.reject(passive, Refusal::Consumer, &[3; 149]).is_err());
    pair.nodes[1].cm.accept(1, passive, Some(&param(&[2; 196]))).unwrap();
    pair.run();
    assert_eq!(*pair.expect(0, EventKind::ConnectResponse).private_data, [2; 196]);

    pair.connect(5000, &param(&[]));
    let request = pair.expect(1, EventKind::ConnectRequest);
    assert_eq!(*request.private_data, [0; 56], "padded");
    pair.nodes[1].cm.reject(request.id, Refusal::Consumer, &[3; 148]).unwrap();
    pair.run();
    let rejected = pair.expect(0, EventKind::Rejected);
    assert_eq!((rejected.status, &*rejected.private_data), (28, &[3; 148][..]));
    pair.expect_nothing();
}

#[test]
fn a_request_of_sdp_has_room_for_its_hello() {
    let mut pair = Pair::default();
    pair.listen(PortSpace::Sdp, 5000, 0);
    let active = pair.resolve(PortSpace::Sdp, 5000);
    let too_long = pair.nodes[0].cm.connect(1, active, &param(&[1; 93]));
    assert!(matches!(too_long, Err(CallError::Invalid(_))));
    pair.nodes[0].cm.connect(1, active, &param(&[1; 92])).unwrap();
    pair.run();
    let request = pair.expect(1, EventKind::ConnectRequest);
    assert_eq!(*request.private_data, [1; 92]);
    pair.nodes[1].cm.accept(1, request.id, Some(&param(&[2; 196]))).unwrap();
    pair.run();
    assert_eq!(*pair.expect(0, EventKind::ConnectResponse).private_data, [2; 196]);

    // A listener of another port space does not take it.
    pair.listen(PortSpace::Tcp, 5001, 0);
    let active = pair.resolve(PortSpace::Sdp, 5001);
    pair.nodes[0].cm.connect(1, active, &param(&[1; 92])).unwrap();
    pair.run();
    assert_eq!(pair.expect(0, EventKind::Rejected).status, 8);
}
