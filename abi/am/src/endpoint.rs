//! Endpoints and their tables.

use std::io::Write;
use std::sync::{Mutex, PoisonError};

use libc::{c_int, c_void};
use quipu::am::{Category, Endpoint, Kind, Message, Name, Tag};
use quipu::{Access, RemoteMemory, VouchedRegion};
use quipu_cabi::{Errno, Handle, Tagged, entry};
use quipu_mem::Vouched;

use crate::bundle::{Opaque, bundle, eb_t, give};
use crate::call::Function;
use crate::codes::{BAD_ARG, Code, OrCode, Outcome, RESOURCE, code, name_of, opcode, status};
use crate::message::Frame;
use crate::process;

/// `ep_t`
pub type ep_t = *mut Opaque;

/// `en_t`: the bytes of a name.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct en_t(pub(crate) [u8; Name::WIRE_LEN]);

/// Segments that are longer, or begin at no memory, are looked at page by page when a message
/// comes.
const PRESENT_MAX: usize = 64 << 20;

/// An endpoint, and what the program has said of it.
pub(crate) struct Private {
    pub(crate) endpoint: Endpoint,
    /// The key of all memory of the process.
    pub(crate) key: quipu::Key,
    bundle: Mutex<usize>,
    segment: Mutex<Segment>,
}

/// The segment: where it is, and its registration. As numbers, since the memory is the program's.
#[derive(Default)]
struct Segment {
    addr: usize,
    len: usize,
    /// Peers may write there while this is here.
    _region: Option<VouchedRegion>,
}

impl Tagged for Private {
    const TAG: u64 = 0x616d_656e_6470_6f69;
}

/// The endpoint of a pointer.
///
/// # Safety
///
/// As [`Handle::get`].
#[inline]
pub(crate) unsafe fn endpoint<'a>(raw: ep_t) -> Outcome<&'a Private> {
    // SAFETY: passed on from the caller.
    unsafe { Handle::<Opaque, Private>::get(raw) }.map(|handle| &**handle).map_err(|_| BAD_ARG)
}

/// Frees an endpoint that no bundle knows any more.
pub(crate) fn free(raw: usize) -> Result<(), Errno> {
    // SAFETY: lists of endpoints hold live ones only, and the program says that it uses them no
    // more.
    drop(unsafe { Handle::<Opaque, Private>::take(raw as ep_t) }?);
    Ok(())
}

/// What a message runs at a function of the program.
fn handler(function: Function, raw: usize) -> impl Fn(&mut Message<'_>) + Send + Sync + 'static {
    move |message| {
        let (kind, len) = (message.kind(), message.payload_len());
        let has_payload = message.category() != Category::Short;
        let payload = message.payload_address();
        let (mut args, count) = ([0; quipu::am::MAX_ARGS], message.args().len());
        args[..count].copy_from_slice(message.args());
        Frame::with(message, raw, |token| match kind {
            Kind::Returned { status: why, operation, .. } => {
                function.returned(status(why), opcode(operation), token);
            }
            _ if has_payload => {
                let len = c_int::try_from(len).unwrap_or(c_int::MAX);
                function.with_payload(token, payload as *mut c_void, len, &args[..count]);
            }
            _ => function.short(token, &args[..count]),
        });
    }
}

/// What a message that comes back does where the program has no handler 0.
fn default_returned(message: &mut Message<'_>) {
    let Kind::Returned { status: why, operation, to } = message.kind() else { return };
    let _ = writeln!(
        std::io::stderr(),
        "quipu: an {} to {to} has come back: {why} (status {}, handler {}, {} arguments). Set handler 0 to \
         go on in such a case.",
        name_of(operation),
        status(why),
        message.handler(),
        message.args().len(),
    );
    std::process::abort();
}

/// Bytes of a name, read from the program.
///
/// # Safety
///
/// `name` is null or a name.
unsafe fn read_name(name: *const en_t) -> Outcome<Name> {
    if name.is_null() {
        return Err(BAD_ARG);
    }
    // SAFETY: it is not null, so the program passes a name.
    let bytes = unsafe { name.read_unaligned() };
    Name::from_bytes(&bytes.0).ok_or(BAD_ARG)
}

fn index(value: c_int) -> Outcome<u32> {
    u32::try_from(value).map_err(|_| BAD_ARG)
}

impl Private {
    fn set_segment(&self, addr: usize, len: usize) -> Outcome {
        let mut segment = self.segment.lock().unwrap_or_else(PoisonError::into_inner);
        if len == 0 {
            self.endpoint.set_segment(None).or_code()?;
            *segment = Segment { addr, len, _region: None };
            return Ok(());
        }
        // The whole address space may be a segment; what is not there is found out later.
        let first = addr.max(1 << 12);
        let last = addr.saturating_add(len).min((1 << 47) - (1 << 12));
        let covered = last.checked_sub(first).filter(|len| *len > 0).ok_or(BAD_ARG)?;
        let on_demand = covered > PRESENT_MAX || first != addr;
        let mut access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        if on_demand {
            access |= Access::ON_DEMAND;
        }
        // SAFETY: the program gives this memory to its peers, until it sets another segment.
        let memory = unsafe { Vouched::new(first, covered as u64, first as u64, access) };
        let domain = self.endpoint.port().domain();
        let region = domain.register_vouched(memory).map_err(|_| BAD_ARG)?;
        let remote =
            RemoteMemory { addr: addr as u64, len: (last - addr) as u64, rkey: region.key() };
        self.endpoint.set_segment(Some(remote)).or_code()?;
        *segment = Segment { addr, len, _region: Some(region) };
        Ok(())
    }
}

entry! {
    /// `AM_AllocateEndpoint`
    fn AM_AllocateEndpoint(eb: eb_t, out: *mut ep_t, name: *mut en_t) -> Code {
        if out.is_null() || name.is_null() {
            return code(Err(BAD_ARG));
        }
        // SAFETY: the program passes what AM_AllocateBundle gave.
        let made = unsafe { bundle(eb) }.and_then(|known| {
            let (_, key) = process::port()?;
            let endpoint = known.bundle.endpoint().or_code()?;
            let own = endpoint.name().or_code()?;
            endpoint.set_handler(0, default_returned).or_code()?;
            let (bundle, segment) = (Mutex::new(eb as usize), Mutex::default());
            let private = Private { endpoint, key, bundle, segment };
            let raw = Handle::create(Opaque::new(), private);
            known.add(raw as usize);
            give(name, en_t(own.to_bytes()))?;
            give(out, raw)
        });
        code(made)
    }

    /// `AM_FreeEndpoint`
    fn AM_FreeEndpoint(raw: ep_t) -> Code {
        // SAFETY: the program passes what AM_AllocateEndpoint gave.
        let Ok(known) = (unsafe { endpoint(raw) }) else { return code(Err(BAD_ARG)) };
        let eb = *known.bundle.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: an endpoint's bundle lives as long as it does.
        if let Ok(bundle) = unsafe { bundle(eb as eb_t) } {
            bundle.remove(raw as usize);
        }
        free(raw as usize)?;
        code(Ok(()))
    }

    /// `AM_MoveEndpoint`
    fn AM_MoveEndpoint(raw: ep_t, from: eb_t, to: eb_t) -> Code {
        // SAFETY: the program passes what was allocated.
        let (known, from, target) = unsafe { (endpoint(raw), bundle(from), bundle(to)) };
        code((|| {
            let (known, from, target) = (known?, from?, target?);
            known.endpoint.move_to(&target.bundle).or_code()?;
            from.remove(raw as usize);
            target.add(raw as usize);
            *known.bundle.lock().unwrap_or_else(PoisonError::into_inner) = to as usize;
            Ok(())
        })())
    }

    /// `AM_SetTag`
    fn AM_SetTag(raw: ep_t, tag: u64) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| known.endpoint.set_tag(Tag(tag)).or_code()))
    }

    /// `AM_GetTag`
    fn AM_GetTag(raw: ep_t, out: *mut u64) -> Code {
        // SAFETY: as above.
        let tag = unsafe { endpoint(raw) }.and_then(|known| known.endpoint.tag().or_code());
        code(tag.and_then(|tag| give(out, tag.0)))
    }

    /// `AM_SetSeg`
    fn AM_SetSeg(raw: ep_t, addr: *mut c_void, len: usize) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| known.set_segment(addr as usize, len)))
    }

    /// `AM_GetSeg`
    fn AM_GetSeg(raw: ep_t, addr: *mut *mut c_void, len: *mut usize) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            let segment = known.segment.lock().unwrap_or_else(PoisonError::into_inner);
            give(addr, segment.addr as *mut c_void)?;
            give(len, segment.len)
        }))
    }

    /// `AM_SetHandler`
    fn AM_SetHandler(raw: ep_t, at: u8, function: *mut c_void) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            if function.is_null() {
                return Err(BAD_ARG);
            }
            let run = handler(Function(function as usize), raw as usize);
            known.endpoint.set_handler(at.into(), run).or_code()
        }))
    }

    /// `AM_SetHandlerAny`
    fn AM_SetHandlerAny(raw: ep_t, at: *mut u8, function: *mut c_void) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            if function.is_null() || at.is_null() {
                return Err(BAD_ARG);
            }
            let run = handler(Function(function as usize), raw as usize);
            let index = known.endpoint.set_any_handler(run).or_code()?;
            give(at, u8::try_from(index).map_err(|_| RESOURCE)?)
        }))
    }

    /// `AM_GetNumHandlers`
    fn AM_GetNumHandlers(raw: ep_t, out: *mut c_int) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }
            .and_then(|known| give(out, known.endpoint.handler_count().or_code()? as c_int)))
    }

    /// `AM_SetNumHandlers`
    fn AM_SetNumHandlers(raw: ep_t, count: c_int) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            // The numbers of handlers are bytes, so the table has the one size.
            if !(0..=256).contains(&count) {
                return Err(RESOURCE);
            }
            known.endpoint.set_handler_count(256).or_code()
        }))
    }

    /// `AM_Map`, with the name by its address
    fn AMX_MapName(raw: ep_t, at: c_int, name: *const en_t, tag: u64) -> Code {
        // SAFETY: as above, and the program passes a name.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            // SAFETY: as above.
            let name = unsafe { read_name(name) }?;
            let at = index(at)?;
            if at >= known.endpoint.translation_count().or_code()? {
                return Err(BAD_ARG);
            }
            known.endpoint.map(at, name, Tag(tag)).map_err(|_| RESOURCE)
        }))
    }

    /// `AM_MapAny`, with the name by its address
    fn AMX_MapAnyName(raw: ep_t, at: *mut c_int, name: *const en_t, tag: u64) -> Code {
        // SAFETY: as above, and the program passes a name.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            if at.is_null() {
                return Err(BAD_ARG);
            }
            // SAFETY: as above.
            let name = unsafe { read_name(name) }?;
            let index = known.endpoint.map_any(name, Tag(tag)).map_err(|_| RESOURCE)?;
            give(at, index as c_int)
        }))
    }

    /// `AM_UnMap`
    fn AM_UnMap(raw: ep_t, at: c_int) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| known.endpoint.unmap(index(at)?).or_code()))
    }

    /// `AM_GetTranslationInuse`
    fn AM_GetTranslationInuse(raw: ep_t, at: c_int) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            let at = index(at)?;
            if at >= known.endpoint.translation_count().or_code()? {
                return Err(BAD_ARG);
            }
            known.endpoint.translation(at).map(drop).map_err(|_| RESOURCE)
        }))
    }

    /// `AM_GetTranslationTag`
    fn AM_GetTranslationTag(raw: ep_t, at: c_int, out: *mut u64) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }
            .and_then(|known| give(out, known.endpoint.translation(index(at)?).or_code()?.1.0)))
    }

    /// `AMX_SetTranslationTag`
    fn AMX_SetTranslationTag(raw: ep_t, at: c_int, tag: u64) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }
            .and_then(|known| known.endpoint.set_translation_tag(index(at)?, Tag(tag)).or_code()))
    }

    /// `AM_GetTranslationName`
    fn AM_GetTranslationName(raw: ep_t, at: c_int, out: *mut en_t) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            let (name, _) = known.endpoint.translation(index(at)?).or_code()?;
            give(out, en_t(name.to_bytes()))
        }))
    }

    /// `AM_GetNumTranslations`
    fn AM_GetNumTranslations(raw: ep_t, out: *mut c_int) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }
            .and_then(|known| give(out, known.endpoint.translation_count().or_code()? as c_int)))
    }

    /// `AM_SetNumTranslations`
    fn AM_SetNumTranslations(raw: ep_t, count: c_int) -> Code {
        // SAFETY: as above.
        code(unsafe { endpoint(raw) }.and_then(|known| {
            let count = u32::try_from(count).map_err(|_| RESOURCE)?;
            known.endpoint.set_translation_count(count).map_err(|_| RESOURCE)
        }))
    }

    /// `AM_SetExpectedResources`
    fn AM_SetExpectedResources(raw: ep_t, endpoints: c_int, outstanding: c_int) -> Code {
        // SAFETY: as above. Memory is shared by all peers here, so there is nothing to set aside.
        let known = unsafe { endpoint(raw) };
        code(if endpoints > 0 && outstanding > 0 { known.map(drop) } else { Err(BAD_ARG) })
    }

    /// `AMX_enEqual`, with both names by their addresses
    fn AMX_NamesEqual(one: *const en_t, other: *const en_t) -> Code {
        // SAFETY: the program passes two names.
        let names = unsafe { (read_name(one), read_name(other)) };
        Ok(c_int::from(matches!(names, (Ok(one), Ok(other)) if one == other)))
    }
}
