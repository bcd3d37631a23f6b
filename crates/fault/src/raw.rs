//! The plan file as it is written: every key with its place, nothing checked but its type.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Deserialize;
use toml::Spanned;

/// One value or a list.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Some1<T> {
    /// One.
    One(T),
    /// A list.
    Many(Vec<T>),
}

impl<T> Some1<T> {
    pub(crate) fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

/// A number, or a text with a unit.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
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
    time: String,
    jitter: String,
    times: u32,
    event: String,
    call: Some1<String>,
    errno: String,
    state: String,
    side: String,
    opcode: Some1<String>,
    bytes: Quantity,
    qp: Some1<u32>,
    qp_num: Some1<u32>,
    cq: Some1<u32>,
    program: Some1<String>,
    env: BTreeMap<String, String>,
    nth: u64,
    every: Quantity,
    probability: f64,
    after: String,
    count: u64,
}
