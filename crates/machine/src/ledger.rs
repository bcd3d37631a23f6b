//! The ledger of a core: how much time went where.

use serde::{Deserialize, Serialize};

/// What a core spends time on. The categories are those of the paper's figures 2 and 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Category {
    /// Nothing to do.
    Idle,
    /// The program.
    User,
    /// System calls and sockets.
    Syscall,
    /// Copies between kernel and program.
    Copy,
    /// Allocating and freeing socket buffers.
    Buffer,
    /// TCP and IP.
    Stack,
    /// The NIC's driver, waiting for registers included.
    Driver,
    /// Interrupts.
    Interrupt,
    /// File system and block layer.
    Fs,
    /// Scheduler, timers, stalls.
    Other,
}

/// Number of categories.
pub const CATEGORIES: usize = 10;

impl Category {
    /// All categories, in the order of the figures.
    pub const ALL: [Self; CATEGORIES] = [
        Self::Idle,
        Self::User,
        Self::Syscall,
        Self::Copy,
        Self::Buffer,
        Self::Stack,
        Self::Driver,
        Self::Interrupt,
        Self::Fs,
        Self::Other,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::User => "user",
            Self::Syscall => "syscall",
            Self::Copy => "copy",
            Self::Buffer => "buffer",
            Self::Stack => "stack",
            Self::Driver => "driver",
            Self::Interrupt => "interrupt",
            Self::Fs => "fs",
            Self::Other => "other",
        }
    }
}

/// Picoseconds of each category.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ledger(pub [u64; CATEGORIES]);

impl Ledger {
    /// Adds time to a category.
    #[inline]
    pub(crate) fn add(&mut self, category: Category, ps: u64) {
        self.0[category as usize] += ps;
    }

    /// What was added since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self(std::array::from_fn(|index| self.0[index].saturating_sub(before.0[index])))
    }

    /// Adds another ledger.
    pub fn merge(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, ps)| *sum += ps);
    }

    /// The time of a category.
    #[must_use]
    pub fn of(&self, category: Category) -> u64 {
        self.0[category as usize]
    }

    /// The time of all categories.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}
