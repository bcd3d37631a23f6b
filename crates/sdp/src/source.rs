//! A buffer that this end has advertised (`SrcAvail`), until the peer has read or refused it.

use crate::{ADVERT_NS, CANCEL_NS, PeerMisbehaved};

/// What became of an advertised buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceEnd {
    /// Bytes that the peer has, from the beginning. The rest goes by [`Connection::send_data`].
    ///
    /// [`Connection::send_data`]: crate::Connection::send_data
    pub taken: u32,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// The peer may read.
    Open { deadline: u64 },
    /// It is to be taken back, but there was no credit for that yet.
    ToCancel,
    /// The peer was asked to give it back, by the message of this number.
    Cancelled { mseq: u32, deadline: u64 },
}

#[derive(Clone, Copy, Debug)]
struct Advert {
    mseq: u32,
    len: u32,
    taken: u32,
    stage: Stage,
}

/// The advertised buffer of a direction.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Source {
    advert: Option<Advert>,
    /// A cancellation whose buffer has ended: nothing new is advertised until it is acknowledged.
    late_cancel: Option<u32>,
    end: Option<SourceEnd>,
}

impl Source {
    pub(crate) fn is_open(&self) -> bool {
        self.advert.is_some()
    }

    /// Whether a buffer may be advertised.
    pub(crate) fn is_free(&self) -> bool {
        self.advert.is_none() && self.late_cancel.is_none() && self.end.is_none()
    }

    pub(crate) fn open(&mut self, now: u64, mseq: u32, len: u32, inline: u32) {
        let stage = Stage::Open { deadline: now.saturating_add(ADVERT_NS) };
        self.advert = Some(Advert { mseq, len, taken: inline, stage });
    }

    pub(crate) fn take_end(&mut self) -> Option<SourceEnd> {
        self.end.take()
    }

    /// Takes the buffer back, as soon as there is a credit for that.
    pub(crate) fn cancel(&mut self) {
        if let Some(advert) = &mut self.advert
            && let Stage::Open { .. } = advert.stage
        {
            advert.stage = Stage::ToCancel;
        }
    }

    pub(crate) fn wants_cancel(&self) -> bool {
        self.advert.is_some_and(|advert| matches!(advert.stage, Stage::ToCancel))
    }

    pub(crate) fn cancel_sent(&mut self, now: u64, mseq: u32) {
        if let Some(advert) = &mut self.advert {
            advert.stage = Stage::Cancelled { mseq, deadline: now.saturating_add(CANCEL_NS) };
        }
    }

    /// The peer has read so many bytes more.
    pub(crate) fn read(&mut self, len: u32) -> Result<(), PeerMisbehaved> {
        let fault = PeerMisbehaved::ReadTooMuch(len);
        let advert = self.advert.as_mut().ok_or(fault)?;
        if len > advert.len - advert.taken {
            return Err(fault);
        }
        advert.taken += len;
        if advert.taken == advert.len {
            self.finish();
        }
        Ok(())
    }

    /// The peer does not read the rest; `acked`: whether it has seen a message of ours.
    pub(crate) fn refuse(&mut self, acked: impl Fn(u32) -> bool) {
        // One that is older than the buffer answers a cancellation of the buffer before.
        if self.advert.is_some_and(|advert| acked(advert.mseq)) {
            self.finish();
        }
    }

    fn finish(&mut self) {
        let Some(advert) = self.advert.take() else { return };
        if let Stage::Cancelled { mseq, .. } = advert.stage {
            self.late_cancel = Some(mseq);
        }
        self.end = Some(SourceEnd { taken: advert.taken });
    }

    /// The peer has acknowledged more.
    pub(crate) fn acknowledged(&mut self, acked: impl Fn(u32) -> bool) {
        self.late_cancel = self.late_cancel.filter(|mseq| !acked(*mseq));
    }

    pub(crate) fn deadline(&self) -> Option<u64> {
        match self.advert?.stage {
            Stage::Open { deadline } | Stage::Cancelled { deadline, .. } => Some(deadline),
            Stage::ToCancel => None,
        }
    }

    /// The deadline has passed; whether the peer has failed to answer a cancellation.
    pub(crate) fn time_out(&mut self, now: u64) -> bool {
        match self.advert.map(|advert| advert.stage) {
            Some(Stage::Open { deadline }) if deadline <= now => {
                self.cancel();
                false
            }
            Some(Stage::Cancelled { deadline, .. }) => deadline <= now,
            _ => false,
        }
    }
}
