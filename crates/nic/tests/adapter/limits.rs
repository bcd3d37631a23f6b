//! What a program is promised, and the values that the adapter has no use for.

use quipu_mem::{Access, RegisterError, Segment, WindowType};
use quipu_nic::{AddressVector, Config, Fault, QpAttr, QpAttrMask, QpState};

use super::pair::{Pair, Way, connected};

const STREAM: Way = Way::Stream(usize::MAX);

/// Anyone who has made all windows still gets all regions, and the other way round.
#[test]
fn there_are_as_many_regions_and_windows_as_promised_of_each() {
    const MOST: u32 = 12;
    let few = |config: &mut Config| config.max_mr = MOST;
    for windows_first in [true, false] {
        let mut pair = Pair::with(STREAM, [few; 2]);
        let (pd, adapter) = (pair.hosts[0].pd, &mut pair.hosts[0].adapter);
        let memory = Segment::heap(64);
        let mut make = |windows: bool| {
            if windows {
                return adapter.alloc_mw(pd, WindowType::Two).map(drop);
            }
            adapter.reg_segment(pd, &memory, None, Access::LOCAL_WRITE).map(drop)
        };
        for windows in [windows_first, !windows_first] {
            (0..MOST).for_each(|_| make(windows).unwrap());
            // More than once: what is refused takes no place.
            for _ in 0..3 * MOST {
                let full = Fault::Register(RegisterError::Full);
                let refused = make(windows).unwrap_err();
                assert!(refused == full || matches!(refused, Fault::Exhausted(_)), "{refused}");
            }
        }
    }
}

/// The other path is judged as the first one is, though it is never taken.
#[test]
fn another_path_has_the_port_and_the_timer_of_a_path() {
    let (mut pair, qps) = connected(STREAM);
    let dgid = pair.hosts[1].adapter.config().gid;
    let good = QpAttr {
        state: QpState::Rts,
        alt_av: AddressVector { dgid, is_global: true, port_num: 1, ..AddressVector::default() },
        alt_port_num: 1,
        alt_timeout: 31,
        ..QpAttr::default()
    };
    let mask = QpAttrMask::STATE | QpAttrMask::ALT_PATH;
    let (now, adapter) = (pair.now, &mut pair.hosts[0].adapter);
    for bad in [
        QpAttr { alt_port_num: 0, ..good },
        QpAttr { alt_port_num: 2, ..good },
        QpAttr { alt_pkey_index: 1, ..good },
        QpAttr { alt_timeout: 32, ..good },
    ] {
        let refused = adapter.modify_qp(now, qps[0], &bad, mask);
        assert!(matches!(refused, Err(Fault::Invalid(_))), "{bad:?}");
    }
    adapter.modify_qp(now, qps[0], &good, mask).unwrap();
}
