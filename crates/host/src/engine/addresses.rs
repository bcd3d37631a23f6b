//! The addresses of the engine while it lives: the host may get others.

use std::sync::Arc;

use quipu_nic::AsyncEvent;

use super::core::Core;
use crate::address::host_addresses;
use crate::config::Device;
use crate::own::OwnAddresses;

impl Core {
    /// Takes notices of the kernel about interfaces and addresses, if any have come.
    pub(super) fn hear_port(&mut self) {
        let Some(port) = &mut self.port else { return };
        let news = port.news();
        if let Some(event) = news.event {
            self.events.of_port(event, |device| device != Device::QuipuQp0);
        }
        if news.any
            && let Ok(all) = host_addresses()
            && let Some(own) = self.own.learn(&all)
        {
            self.set_addresses(Arc::new(own));
        }
    }

    fn set_addresses(&mut self, own: Arc<OwnAddresses>) {
        tracing::debug!(rows = own.rows().len(), "the addresses of this host have changed");
        self.adapter.set_gid_rows(&own.other_gids());
        self.adapter.set_host_addresses(own.host_gids());
        self.net.set_addresses(Arc::clone(&own));
        self.datagrams.set_addresses(Arc::clone(&own));
        self.links.set_addresses(Arc::clone(&own));
        if let Some(cm) = &mut self.cm {
            cm.set_addresses(Arc::clone(&own));
        }
        let grown = own.rows().len() > self.own.rows().len();
        self.own = own;
        if grown {
            let event = AsyncEvent::GidChange;
            self.events.of_port(event, |device| device == Device::Quipu0);
        }
    }
}
