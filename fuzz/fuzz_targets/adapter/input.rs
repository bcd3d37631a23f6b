//! The input of a run as a source of choices. At its end everything is 0.

pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Up to 255 bytes, as many as a first byte says.
    pub fn bytes(&mut self) -> &'a [u8] {
        let len = self.byte();
        self.take(len.into())
    }

    fn fixed<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let taken = self.take(N);
        out[..taken.len()].copy_from_slice(taken);
        out
    }

    pub fn byte(&mut self) -> u8 {
        self.fixed::<1>()[0]
    }

    pub fn flag(&mut self) -> bool {
        self.byte() & 1 != 0
    }

    pub fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.fixed())
    }

    pub fn long(&mut self) -> u64 {
        u64::from_le_bytes(self.fixed())
    }

    /// A small number most of the time, else any.
    pub fn count(&mut self) -> u32 {
        match self.byte() {
            small @ 0..=199 => small.into(),
            200..=229 => u32::from_le_bytes([self.byte(), self.byte(), 0, 0]),
            _ => self.word(),
        }
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.byte()) % from.len()]
    }
}
