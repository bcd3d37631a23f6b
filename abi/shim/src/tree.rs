//! The files, by their path. Pure: no call to the system is made here.

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    /// A folder, with its place in [`FOLDERS`], or the folder of the device's interfaces.
    Folder(Folder),
    /// A file, and its text.
    File(Text),
    /// The character device.
    Device,
    /// Such a device where the kernel has none.
    StandIn,
}

impl Node {
    /// Whether the kernel may have one of the same path, which then counts.
    pub(crate) fn yields(self) -> bool {
        match self {
            Self::Folder(Folder::Fixed(index)) => {
                FOLDERS.get(index).is_some_and(|folder| folder.shared)
            }
            Self::StandIn => true,
            Self::Folder(_) | Self::File(_) | Self::Device => false,
        }
    }

    /// Whether it is a character device.
    pub(crate) fn is_device(self) -> bool {
        matches!(self, Self::Device | Self::StandIn)
    }
}

/// A folder that can be listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Folder {
    /// An entry of [`FOLDERS`].
    Fixed(usize),
    /// The network interfaces of the device of that number: one.
    Interfaces(usize),
    /// That interface, or what a path says instead of its name.
    Interface(usize),
}

impl Folder {
    /// A number of its own, below [`Self::COUNT`].
    pub(crate) fn number(self) -> usize {
        match self {
            Self::Fixed(index) => index,
            Self::Interfaces(which) => FOLDERS.len() + which,
            Self::Interface(which) => FOLDERS.len() + DEVICES.len() + which,
        }
    }

    /// How many numbers there are.
    const COUNT: usize = FOLDERS.len() + 2 * DEVICES.len();

    /// The folder of a number.
    pub(crate) fn of_number(number: usize) -> Option<Self> {
        let beyond = number.checked_sub(FOLDERS.len());
        match beyond {
            None => Some(Self::Fixed(number)),
            Some(which) if which < DEVICES.len() => Some(Self::Interfaces(which)),
            Some(beyond) => {
                (number < Self::COUNT).then_some(Self::Interface(beyond - DEVICES.len()))
            }
        }
    }

    /// Its path, but for the name of an interface.
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Fixed(index) => FOLDERS.get(index).map_or("", |folder| folder.path),
            Self::Interfaces(which) | Self::Interface(which) => {
                INTERFACES.get(which).copied().unwrap_or("")
            }
        }
    }
}

/// The text of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Text {
    /// Always the same.
    Fixed(&'static str),
    /// The GID of the device of that number in that row, as eight groups of hexadecimal digits.
    Gid(usize, u32),
    /// Its node GUID, as four groups.
    Guid(usize),
    /// The kind of the GID in a row.
    GidType(usize, u32),
    /// The kind of its port.
    LinkLayer(usize),
    /// The LID of its port.
    Lid(usize),
    /// The name of the network interface that has the address in that row.
    Interface(u32),
}

/// An entry of a folder.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    kind: Kind,
}

enum Kind {
    Folder,
    File(Text),
    Device,
    Interfaces,
}

/// A folder and what is in it.
pub(crate) struct Fixed {
    pub(crate) path: &'static str,
    pub(crate) entries: &'static [Entry],
    /// Whether a kernel with other RDMA devices may have a folder of this path, which then counts.
    pub(crate) shared: bool,
}

/// The number that the name of a row is: at most two digits.
const fn number(name: &str) -> u32 {
    match name.as_bytes() {
        [one] => (*one - b'0') as u32,
        [ten, one] => (*ten - b'0') as u32 * 10 + (*one - b'0') as u32,
        _ => 0,
    }
}

const fn folder(name: &'static str) -> Entry {
    Entry { name, kind: Kind::Folder }
}
const fn text(name: &'static str, text: &'static str) -> Entry {
    Entry { name, kind: Kind::File(Text::Fixed(text)) }
}
const fn live(name: &'static str, text: Text) -> Entry {
    Entry { name, kind: Kind::File(text) }
}
const fn at(path: &'static str, entries: &'static [Entry]) -> Fixed {
    Fixed { path, entries, shared: false }
}
const fn shared(path: &'static str, entries: &'static [Entry]) -> Fixed {
    Fixed { path, entries, shared: true }
}

/// The devices, in the order in which the engine lists them by default: name, number, type of node, and rows
/// of GIDs.
macro_rules! devices {
    ($(
        $name:literal: $which:literal $dev:literal $node:literal [$($row:literal)*];
    )*) => {
        /// Their names.
        pub(crate) const DEVICES: [&str; 3] = [$($name),*];

        /// The folders of their network interfaces.
        const INTERFACES: [&str; 3] =
            [$(concat!("/sys/class/infiniband/", $name, "/device/net")),*];

        /// Every folder of which the content is known beforehand.
        pub(crate) static FOLDERS: [Fixed; 33] = [
            shared("/dev/infiniband", &[$(Entry { name: $name, kind: Kind::Device }),*]),
            shared("/sys/class/infiniband", &[$(folder($name)),*]),
            shared("/sys/class/infiniband_verbs", &[$(folder($name)),*]),
            $(
            at(
                concat!("/sys/class/infiniband_verbs/", $name),
                &[
                    text("ibdev", concat!($name, "\n")),
                    text("abi_version", "1\n"),
                    text("dev", $dev),
                ],
            ),
            at(
                concat!("/sys/class/infiniband/", $name),
                &[
                    folder("device"),
                    folder("ports"),
                    text("board_id", "QUIPU\n"),
                    text("fw_ver", concat!(env!("CARGO_PKG_VERSION"), "\n")),
                    text("hca_type", "Quipu\n"),
                    text("hw_rev", "1\n"),
                    text("node_desc", concat!($name, "\n")),
                    live("node_guid", Text::Guid($which)),
                    text("node_type", $node),
                    live("sys_image_guid", Text::Guid($which)),
                ],
            ),
            at(
                concat!("/sys/class/infiniband/", $name, "/device"),
                &[Entry { name: "net", kind: Kind::Interfaces }, text("numa_node", "-1\n")],
            ),
            at(concat!("/sys/class/infiniband/", $name, "/ports"), &[folder("1")]),
            at(
                concat!("/sys/class/infiniband/", $name, "/ports/1"),
                &[
                    text("cap_mask", "0x04010000\n"),
                    folder("gid_attrs"),
                    folder("gids"),
                    live("lid", Text::Lid($which)),
                    text("lid_mask_count", "0\n"),
                    live("link_layer", Text::LinkLayer($which)),
                    text("phys_state", "5: LinkUp\n"),
                    folder("pkeys"),
                    text("rate", "100 Gb/sec (4X EDR)\n"),
                    live("sm_lid", Text::Lid($which)),
                    text("sm_sl", "0\n"),
                    text("state", "4: ACTIVE\n"),
                ],
            ),
            at(
                concat!("/sys/class/infiniband/", $name, "/ports/1/gids"),
                &[$(live($row, Text::Gid($which, number($row)))),*],
            ),
            at(
                concat!("/sys/class/infiniband/", $name, "/ports/1/pkeys"),
                &[text("0", "0xffff\n")],
            ),
            at(
                concat!("/sys/class/infiniband/", $name, "/ports/1/gid_attrs"),
                &[folder("ndevs"), folder("types")],
            ),
            at(
                concat!("/sys/class/infiniband/", $name, "/ports/1/gid_attrs/ndevs"),
                &[$(live($row, Text::Interface(number($row)))),*],
            ),
            at(
                concat!("/sys/class/infiniband/", $name, "/ports/1/gid_attrs/types"),
                &[$(live($row, Text::GidType($which, number($row)))),*],
            ),
            )*
        ];
    };
}

devices! {
    "quipu0": 0 "231:192\n" "1: CA\n" [
        "0" "1" "2" "3" "4" "5" "6" "7" "8" "9" "10" "11" "12" "13" "14" "15"
        "16" "17" "18" "19" "20" "21" "22" "23" "24" "25" "26" "27" "28" "29" "30" "31"
    ];
    "quipu_iw0": 1 "231:193\n" "4: RNIC\n" ["0"];
    "quipu_qp0": 2 "231:194\n" "7: unspecified\n" ["0"];
}

/// The device that is only there where a packet link is.
pub(crate) const NEEDS_LINK: &str = "quipu_qp0";

/// What the kernel calls the first of its devices. PSM3 finds no adapter on a machine without it, and does
/// not open it. It is ours where there is none, and in no list.
const FIRST_OF_KERNEL: &str = "/dev/infiniband/uverbs0";

/// The longest path that can be ours, and a zero behind it.
pub(crate) const LONGEST: usize = 256;

/// What an absolute path names, if it is one of ours, and its plain spelling in `buffer`, behind
/// which is a zero. Repeated slashes, slashes at the end, `.` and `..` are understood as the kernel
/// does (none of ours is a symbolic link).
pub(crate) fn find<'a>(path: &[u8], buffer: &'a mut [u8; LONGEST]) -> Option<(&'a [u8], Node)> {
    let length = simplify(path, buffer)?;
    *buffer.get_mut(length)? = 0;
    let path = buffer.get(..length)?;
    Some((path, named(path)?))
}

/// The number of the device of which a path of plain spelling is a part.
pub(crate) fn owner(path: &[u8]) -> Option<usize> {
    let below = FOLDERS
        .iter()
        .filter(|folder| folder.shared)
        .find_map(|folder| path.strip_prefix(folder.path.as_bytes())?.strip_prefix(b"/"))?;
    let name = below.split(|byte| *byte == b'/').next()?;
    DEVICES.iter().position(|device| device.as_bytes() == name)
}

/// What a path of plain spelling names.
fn named(path: &[u8]) -> Option<Node> {
    if path == FIRST_OF_KERNEL.as_bytes() {
        return Some(Node::StandIn);
    }
    for (which, net) in INTERFACES.iter().enumerate() {
        match path.strip_prefix(net.as_bytes()) {
            Some(b"") => return Some(Node::Folder(Folder::Interfaces(which))),
            Some([b'/', name @ ..]) if !name.is_empty() => {
                let folder = Node::Folder(Folder::Interface(which));
                return (!name.contains(&b'/')).then_some(folder);
            }
            _ => {}
        }
    }
    if let Some(index) = FOLDERS.iter().position(|folder| folder.path.as_bytes() == path) {
        return Some(Node::Folder(Folder::Fixed(index)));
    }
    let cut = path.iter().rposition(|byte| *byte == b'/')?;
    let (parent, name) = (path.get(..cut)?, path.get(cut + 1..)?);
    let parent = FOLDERS.iter().find(|folder| folder.path.as_bytes() == parent)?;
    let entry = parent.entries.iter().find(|entry| entry.name.as_bytes() == name)?;
    match entry.kind {
        Kind::File(text) => Some(Node::File(text)),
        Kind::Device => Some(Node::Device),
        Kind::Folder | Kind::Interfaces => None,
    }
}

/// Writes a path to `buffer` without empty components, `.` and `..`; its length.
fn simplify(path: &[u8], buffer: &mut [u8; LONGEST]) -> Option<usize> {
    let mut length = 0;
    for part in path.split(|byte| *byte == b'/') {
        if part.is_empty() || part == b"." {
            continue;
        }
        if part == b".." {
            // One component less, if there is one.
            length = buffer.get(..length)?.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
            continue;
        }
        *buffer.get_mut(length)? = b'/';
        buffer.get_mut(length + 1..length + 1 + part.len())?.copy_from_slice(part);
        length += 1 + part.len();
    }
    Some(length)
}

impl Entry {
    /// Whether it is a folder, for `d_type`.
    pub(crate) fn is_folder(&self) -> bool {
        matches!(self.kind, Kind::Folder | Kind::Interfaces)
    }

    /// Whether it is the character device, for `d_type`.
    pub(crate) fn is_device(&self) -> bool {
        matches!(self.kind, Kind::Device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;

    fn find(path: &[u8]) -> Option<Node> {
        super::find(path, &mut [0; LONGEST]).map(|(_, node)| node)
    }

    #[test]
    fn every_entry_of_every_folder_is_found_under_its_path() {
        for folder in &FOLDERS {
            assert!(matches!(find(folder.path.as_bytes()), Some(Node::Folder(_))));
            for entry in folder.entries {
                let path = format!("{}/{}", folder.path, entry.name);
                let found = find(path.as_bytes());
                assert!(found.is_some(), "{path}");
                assert_eq!(matches!(found, Some(Node::Folder(_))), entry.is_folder(), "{path}");
            }
        }
    }

    #[test]
    fn careless_spellings_are_understood_and_others_are_not_ours() {
        let types = Some(Node::File(Text::GidType(0, 0)));
        let path = b"/sys//class/./infiniband/quipu0/ports/1/gid_attrs/types/0/";
        assert_eq!(find(path), types);
        assert_eq!(find(b"/dev/infiniband/quipu0"), Some(Node::Device));
        let other = b"/sys/class/infiniband/quipu_iw0/node_type";
        assert_eq!(find(other), Some(Node::File(Text::Fixed("4: RNIC\n"))));
        assert_eq!(find(b"/dev/infiniband/../../dev/infiniband/quipu0"), Some(Node::Device));
        assert_eq!(find(b"/dev//infiniband/uverbs0"), Some(Node::StandIn));
        for other in [
            &b"/dev/infiniband/uverbs1"[..],
            b"/sys/class/infiniband/mlx5_0",
            b"/sys/class/infiniband/quipu0/../mlx5_0",
            b"/../..",
            b"/sys/class/infiniband/quipu0/ports/2",
            b"/dev/null",
            b"",
            &[b'a'; 1000],
        ] {
            assert_eq!(find(other), None);
        }
    }

    #[test]
    fn an_interface_is_a_folder_without_depth() {
        let net = "/sys/class/infiniband/quipu0/device/net";
        assert_eq!(find(net.as_bytes()), Some(Node::Folder(Folder::Interfaces(0))));
        let interface = format!("{net}/eth0");
        assert_eq!(find(interface.as_bytes()), Some(Node::Folder(Folder::Interface(0))));
        assert_eq!(find(format!("{net}/eth0/mtu").as_bytes()), None);
    }

    #[test]
    fn every_folder_has_a_number_by_which_it_is_found() {
        for number in 0..Folder::COUNT {
            let folder = Folder::of_number(number).unwrap();
            assert_eq!(folder.number(), number);
            assert!(find(folder.path().as_bytes()).is_some());
        }
        assert_eq!(Folder::of_number(Folder::COUNT), None);
    }

    #[test]
    fn the_plain_spelling_and_the_owner_of_a_path() {
        let mut buffer = [0; LONGEST];
        let path = b"//sys/class/infiniband/../infiniband/quipu_qp0//ports/";
        let (plain, _) = super::find(path, &mut buffer).unwrap();
        assert_eq!(plain, b"/sys/class/infiniband/quipu_qp0/ports");
        assert_eq!(owner(plain), Some(2));
        assert_eq!(owner(b"/sys/class/infiniband_verbs/quipu_iw0/ibdev"), Some(1));
        assert_eq!(owner(b"/dev/infiniband/quipu0"), Some(0));
        assert_eq!(owner(b"/sys/class/infiniband"), None);
        assert_eq!(owner(b"/dev/infiniband/uverbs0"), None);
    }
}
