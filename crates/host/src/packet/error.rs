//! Why a link cannot be opened: what happened, why, and what to do.

use std::io;

use quipu_inet::stack::MIN_MTU;

use super::LinkSpec;

/// Why a link cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the link {link}: {what}: {source}; {remedy}")]
pub struct LinkError {
    /// The link.
    pub link: String,
    /// What was tried.
    pub what: &'static str,
    /// Why it failed.
    pub source: io::Error,
    /// What to do.
    pub remedy: String,
}

impl LinkError {
    /// An error of the kernel while `what` was tried for a link.
    pub(crate) fn new(link: &LinkSpec, what: &'static str, source: io::Error) -> Self {
        let remedy = remedy(link, &source);
        Self { link: link.to_string(), what, source, remedy }
    }

    /// Its interface takes shorter packets only than IPv6 needs.
    pub(super) fn narrow(link: &LinkSpec, mtu: u32) -> Self {
        let name = link.interface().unwrap_or_default();
        Self {
            link: link.to_string(),
            what: "reading the MTU",
            source: io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{mtu} bytes are less than the {MIN_MTU} of IPv6 (RFC 8200 5)"),
            ),
            remedy: format!("widen the interface (ip link set {name} mtu {MIN_MTU})"),
        }
    }

    /// For use with `map_err`.
    pub(super) fn at(link: &LinkSpec, what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::new(link, what, source)
    }
}

/// What to do about an error of the kernel.
fn remedy(link: &LinkSpec, error: &io::Error) -> String {
    // Of a device that has none, the kernel would have chosen one.
    let name = link.interface().filter(|name| !name.is_empty()).unwrap_or("NAME");
    if let LinkSpec::Share { name, user } = link
        && let Some(remedy) = remedy_of_share(name, user.as_deref(), error.kind())
    {
        return remedy;
    }
    match (link, error.raw_os_error()) {
        (LinkSpec::Xdp { .. }, Some(libc::EPERM | libc::EACCES | libc::ENOSYS)) => format!(
            "grant the capabilities for XDP (setcap cap_net_raw,cap_net_admin,cap_bpf+ep on the \
             program, outside of user namespaces), or use packet:{name}, which needs only \
             cap_net_raw"
        ),
        (LinkSpec::Xdp { .. }, Some(libc::EBUSY | libc::EEXIST)) => format!(
            "another XDP program or socket uses the interface or the queue; remove it, choose \
             another queue, or use packet:{name}"
        ),
        (LinkSpec::Xdp { .. }, Some(libc::EINVAL)) => {
            format!("give a queue that the interface has (ethtool -l {name} lists them), or use \
                packet:{name}")
        }
        (LinkSpec::Xdp { .. }, Some(libc::EOPNOTSUPP)) => {
            format!("the kernel has no XDP sockets; use packet:{name}")
        }
        (LinkSpec::Tap { .. }, Some(libc::EPERM | libc::EACCES)) => format!(
            "ask an administrator to create the device for you (ip tuntap add dev {name} mode \
             tap vnet_hdr user YOU), or use a udp: link, which needs no privilege"
        ),
        (LinkSpec::Tap { .. }, Some(libc::EBUSY)) => {
            "another process uses it, or it is not a TAP device; choose another name".to_owned()
        }
        (LinkSpec::Tap { .. }, Some(libc::EINVAL)) => format!(
            "the interface {name} exists and is not a TAP device, or has several queues; choose \
             another name, or create the device again (ip tuntap add dev {name} mode tap \
             vnet_hdr)"
        ),
        (LinkSpec::Namespace { .. }, Some(libc::EPERM | libc::EACCES | libc::ENOSPC)) => {
            "allow users to create user namespaces (sysctl user.max_user_namespaces, on some systems \
             kernel.unprivileged_userns_clone=1 or \
             kernel.apparmor_restrict_unprivileged_userns=0), or use a udp: link"
                .to_owned()
        }
        (LinkSpec::Namespace { .. }, Some(libc::EINVAL)) => {
            "choose an MTU from 1280 to 65521, and host addresses".to_owned()
        }
        (LinkSpec::Tap { .. } | LinkSpec::Namespace { .. }, Some(libc::ENOENT | libc::ENODEV)) => {
            "load the module tun (modprobe tun), or give the container /dev/net/tun".to_owned()
        }
        (LinkSpec::Packet { .. }, Some(libc::EPERM | libc::EACCES)) => {
            "grant the capability for raw packets (setcap cap_net_raw+ep on the program), or use \
             a tap: device that an administrator creates for you, or a udp: link, which needs no \
             privilege"
                .to_owned()
        }
        (LinkSpec::Packet { .. } | LinkSpec::Xdp { .. }, Some(libc::EAFNOSUPPORT)) => {
            format!("{name} is not an Ethernet interface; choose another, or use a udp: link")
        }
        (LinkSpec::Packet { .. } | LinkSpec::Xdp { .. }, Some(libc::EADDRINUSE)) => {
            "the kernel has this station address on that interface; choose another".to_owned()
        }
        (LinkSpec::Udp { .. }, Some(libc::EADDRNOTAVAIL)) => {
            "give an address of this host (ip address lists them)".to_owned()
        }
        (LinkSpec::Udp { .. }, Some(libc::EADDRINUSE)) => {
            "choose another port, or 0 for any".to_owned()
        }
        (_, Some(libc::ENODEV | libc::ENXIO)) => {
            "give an existing interface (ip link lists them)".to_owned()
        }
        (_, Some(libc::EMFILE)) => "raise the limit of open file descriptors (ulimit -n)".to_owned(),
        _ => "see `quipu doctor`".to_owned(),
    }
}

/// What to do about an adapter that another process shares under this name.
fn remedy_of_share(name: &str, user: Option<&str>, kind: io::ErrorKind) -> Option<String> {
    Some(match kind {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => match user {
            None => format!(
                "share one first, as this user: quipu nic --share {name} --link ...; or ask root \
                 to share one with you (add --user YOU); if another user shares it, use \
                 share:{name},user=USER"
            ),
            Some(user) => format!(
                "ask {user} to share one with you: quipu nic --share {name} --user YOU --link \
                 ..."
            ),
        },
        io::ErrorKind::PermissionDenied => format!(
            "ask for it to be shared with you: quipu nic --share {name} with --user YOU or one \
             of your groups (--group); a program has the groups that its user had at login"
        ),
        io::ErrorKind::InvalidInput => {
            "give an existing user (getent passwd lists them), or a number".to_owned()
        }
        io::ErrorKind::ResourceBusy => "end a program that uses it, or share another adapter \
            with another name: quipu nic --share NAME --link ..."
            .to_owned(),
        io::ErrorKind::Unsupported => {
            "run both with the same version of Quipu: share the adapter again, or rebuild the \
             program"
                .to_owned()
        }
        io::ErrorKind::TimedOut => format!(
            "check whether it is stopped (kill -CONT continues it), or end it and share the \
             adapter again: quipu nic --share {name} --link ..."
        ),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => format!(
            "it has ended, or cannot serve another program: read its messages, and share the \
             adapter again if it has ended: quipu nic --share {name} --link ..."
        ),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_to_share_an_adapter_is_told() {
        let said = |link: &str, kind: io::ErrorKind| {
            LinkError::new(&link.parse().unwrap(), "attach", kind.into()).to_string()
        };
        let nobody = said("share:lab", io::ErrorKind::NotFound);
        assert!(nobody.contains("quipu nic --share lab --link"), "{nobody}");
        assert!(nobody.contains("share:lab,user=USER"), "{nobody}");
        let of_another = said("share:lab,user=alice", io::ErrorKind::NotFound);
        assert!(of_another.contains("ask alice to share one with you"), "{of_another}");
        let stranger = said("share:lab", io::ErrorKind::PermissionDenied);
        assert!(stranger.contains("--user YOU or one of your groups"), "{stranger}");
    }

    #[test]
    fn a_device_whose_name_the_kernel_was_to_choose_is_named_by_a_word() {
        let said = |link: &str| {
            let refused = io::Error::from_raw_os_error(libc::EPERM);
            LinkError::new(&link.parse().unwrap(), "open it", refused).to_string()
        };
        assert!(said("tap:").contains("ip tuntap add dev NAME mode tap"));
        assert!(said("tap:qp0").contains("ip tuntap add dev qp0 mode tap"));
    }
}
