//! The plan file as it is written: every key with its place, nothing checked but its type.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Deserialize;
use toml::Spanned;

macro_rules! one_or_many {
    ($name:ident, $ty:ty, $expecting:literal) => {
        /// One value or a list.
        #[derive(Clone, Debug, Deserialize)]
        #[serde(untagged, expecting = $expecting)]
        pub(crate) enum $name {
            /// One.
            One($ty),
            /// A list.
            Many(Vec<$ty>),
        }

        impl $name {
            pub(crate) fn into_vec(self) -> Vec<$ty> {
                match self {
                    Self::One(one) => vec![one],
                    Self::Many(many) => many,
                }
            }
        }
    };
}

one_or_many!(Words, String, "expected a name in quotes, or a list of such names");
one_or_many!(Numbers, u32, "expected a number of 32 bits, or a list of such numbers");

/// A number, or a text with a unit.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a whole number, or a text such as \"5ms\" or \"4K..64K\"")]
pub(crate) enum Quantity {
    /// A number.
    Number(u64),
    /// A text.
    Text(String),
}

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawPlan {
    #[serde(default)]
    pub(crate) seed: u64,
    #[serde(default)]
    pub(crate) fault: Vec<Spanned<RawFault>>,
}

macro_rules! raw_fault {
    ($($key:ident: $ty:ty,)*) => {
        /// One `[[fault]]`.
        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct RawFault {
            $(pub(crate) $key: Option<Spanned<$ty>>,)*
        }

        impl RawFault {
            /// The keys that are given, with their places.
            pub(crate) fn keys(&self) -> Vec<(&'static str, Range<usize>)> {
                let mut keys = Vec::new();
                $(if let Some(value) = &self.$key {
                    keys.push((stringify!($key), value.span()));
                })*
                keys
            }
        }
    };
}

raw_fault! {
    name: String,
    inject: String,
    status: String,
    time: Quantity,
    jitter: Quantity,
    times: u32,
    event: String,
    call: Words,
    errno: String,
    state: String,
    side: String,
    opcode: Words,
    bytes: Quantity,
    qp: Numbers,
    qp_num: Numbers,
    cq: Numbers,
    program: Words,
    env: BTreeMap<String, String>,
    nth: u64,
    every: Quantity,
    probability: f64,
    after: Quantity,
    count: u64,
}
