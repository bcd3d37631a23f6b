//! Two adapters with XDP sockets on the ends of a veth pair: queue pairs on both sides.

use super::adapter::Adapter;
use super::pairs::{ORDERS, Order, Plan};
use super::socket::VERSIONS;
use super::space::inside;

/// The window of a queue pair here.
const RECEIVES: (u64, u64) = (16, 65_536);

/// The part of the other end in a plan.
fn mirrored(plan: &Plan) -> Plan {
    let order = match plan.order {
        Order::Together => Order::Together,
        Order::KernelFirst => Order::AdapterFirst,
        Order::AdapterFirst => Order::KernelFirst,
    };
    Plan { there: plan.back, back: plan.there, order }
}

fn xdp_sockets(name: &str, mtu: u32) {
    if !inside(&format!("twins::{name}")) {
        return;
    }
    let Some(adapters) = Adapter::pair(mtu) else { return };
    for version in VERSIONS {
        for server in [0, 1] {
            for order in ORDERS {
                let plan = Plan { there: 1 << 20, back: 700_001, order };
                let plans = [plan, mirrored(&plan)];
                let what = format!("version {version}, server {server}, {:?}", plans[0]);
                let mut ends = adapters.each_ref().map(|adapter| adapter.queue_pair(RECEIVES));
                ends[1].adapters = false;
                adapters[server].offer(&ends[server]);
                ends[1 - server].connect(adapters[server].address(version), None);
                let [one, other] = &mut ends;
                one.until(&what, |it| {
                    other.turn();
                    // Both have to be asked.
                    it.step(&plans[0]) & other.step(&plans[1])
                });
                one.check(&what, &plans[0]);
                other.check(&what, &plans[1]);
            }
        }
    }
}

#[test]
fn xdp_sockets_of_1500() {
    xdp_sockets("xdp_sockets_of_1500", 1_500);
}

#[test]
fn xdp_sockets_of_3000() {
    xdp_sockets("xdp_sockets_of_3000", 3_000);
}
