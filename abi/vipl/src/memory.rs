//! Protection tags and registered memory.

use std::collections::HashMap;

use libc::c_ulong;
use quipu::{Access, Key, ProtectionDomain, VouchedRegion};
use quipu_cabi::entry;
use quipu_mem::Vouched;
use quipu_via::codes::{Code, Outcome, Status};
use quipu_via::descriptor::Segment;

use crate::handle::{self, Id, Kind};
use crate::nic::{MAX_PTAGS, MAX_REGIONS, Nic, State, report};
use crate::touch::{Way, give, take};
use crate::types::{VIP_MEM_ATTRIBUTES, VIP_PVOID, VipReturn, code};

/// A protection tag.
pub(crate) struct Ptag {
    domain: ProtectionDomain,
    /// Whether it is the one that shares its domain with VIs and memory that have none.
    is_base: bool,
}

/// Registered memory. Its handle is the adapter's key, which peers use in RDMA requests.
pub(crate) struct Region {
    addr: u64,
    len: u64,
    tag: Option<Id>,
    rights: Rights,
    own: VouchedRegion,
    /// The same memory under the tags of VIs that may use it without having its tag. Peers do not reach it
    /// by these.
    others: HashMap<Option<Id>, VouchedRegion>,
}

/// What peers may do.
#[derive(Clone, Copy)]
struct Rights {
    write: bool,
    read: bool,
}

impl Rights {
    fn access(self) -> Access {
        let mut access = Access::LOCAL_WRITE;
        access.set(Access::REMOTE_WRITE, self.write);
        access.set(Access::REMOTE_READ, self.read);
        access
    }
}

impl Region {
    fn holds(&self, addr: u64, len: u64) -> bool {
        let offset = addr.wrapping_sub(self.addr);
        addr >= self.addr && offset <= self.len && len <= self.len - offset
    }

    pub(crate) fn uses(&self, tag: Id) -> bool {
        self.tag == Some(tag)
    }
}

impl State {
    /// The domain of a tag.
    pub(crate) fn domain(&self, nic: &Nic, tag: Option<Id>) -> Option<ProtectionDomain> {
        match tag {
            None => Some(nic.base.clone()),
            Some(tag) => self.ptags.get(&tag).map(|ptag| ptag.domain.clone()),
        }
    }

    /// How memory of the program is reached, if this handle is that of a region that has it.
    pub(crate) fn way(&self, handle: u32, addr: u64, len: u64) -> Way {
        match self.regions.get(&handle) {
            Some(region) if region.holds(addr, len) => Way::Registered,
            _ => Way::Unknown,
        }
    }

    /// Cuts the segments of a receive where their regions end, and drops those after the first cut. Programs
    /// of VIA hardware, which checks memory when data come, post receives that are longer than their memory.
    pub(crate) fn clip(&self, segments: &mut [Segment]) {
        let mut is_cut = false;
        for segment in segments {
            let region = self.regions.get(&segment.handle);
            if is_cut {
                segment.len = 0;
            } else if let Some(region) = region.filter(|region| region.holds(segment.addr, 1)) {
                let room = region.len - (segment.addr - region.addr);
                is_cut = u64::from(segment.len) > room;
                segment.len = u64::from(segment.len).min(room) as u32;
            }
        }
    }

    /// Checks a local segment for a VI of this tag, and gives it the key under which the adapter of that VI
    /// knows the memory.
    pub(crate) fn resolve(
        &mut self,
        nic: &Nic,
        tag: Option<Id>,
        segment: &mut Segment,
    ) -> Result<(), Status> {
        if segment.len == 0 {
            return Ok(());
        }
        let domain = self.domain(nic, tag);
        let base_of = |tag: Option<Id>, ptags: &HashMap<Id, Ptag>| {
            tag.is_none_or(|tag| ptags.get(&tag).is_some_and(|ptag| ptag.is_base))
        };
        let is_base = base_of(tag, &self.ptags);
        let region = self.regions.get_mut(&segment.handle);
        let region = region.ok_or(Status::PROTECTION_ERROR)?;
        if !region.holds(segment.addr, u64::from(segment.len)) {
            return Err(Status::PROTECTION_ERROR);
        }
        if region.tag == tag {
            return Ok(());
        }
        // No tag goes with all tags, except in the strict mode.
        if nic.strict || (tag.is_some() && region.tag.is_some()) {
            return Err(Status::PROTECTION_ERROR);
        }
        if is_base && base_of(region.tag, &self.ptags) {
            return Ok(());
        }
        if let Some(other) = region.others.get(&tag) {
            segment.handle = other.key().0;
            return Ok(());
        }
        let domain = domain.ok_or(Status::PROTECTION_ERROR)?;
        let rights = Rights { write: false, read: false };
        let other = register(&domain, region.addr, region.len, rights);
        let other = other.map_err(|_| Status::PROTECTION_ERROR)?;
        segment.handle = other.key().0;
        region.others.insert(tag, other);
        Ok(())
    }
}

fn register(
    domain: &ProtectionDomain,
    addr: u64,
    len: u64,
    rights: Rights,
) -> Result<VouchedRegion, quipu::Error> {
    let vouched = |access| {
        // SAFETY: the program promises by VipRegisterMem that the memory stays mapped until it deregisters
        // it; that it is mapped now is checked by the adapter.
        unsafe { Vouched::new(addr as usize, len, addr, access) }
    };
    match domain.register_vouched(vouched(rights.access())) {
        // Constants of the program can be sent, but not received into.
        Err(_) if !rights.write => {
            let access = rights.access() - Access::LOCAL_WRITE;
            domain.register_vouched(vouched(access))
        }
        other => other,
    }
}

/// The attributes of a program, checked.
fn checked(
    nic: &Nic,
    state: &State,
    attributes: *const VIP_MEM_ATTRIBUTES,
) -> Outcome<(Option<Id>, Rights)> {
    let attributes = take(attributes)?;
    let tag = state.tag(nic, attributes.ptag)?;
    let rights =
        Rights { write: attributes.enable_rdma_write != 0, read: attributes.enable_rdma_read != 0 };
    Ok((tag, rights))
}

impl State {
    /// The tag of a handle; NULL is none.
    pub(crate) fn tag(&self, nic: &Nic, raw: VIP_PVOID) -> Outcome<Option<Id>> {
        if raw.is_null() {
            return Ok(None);
        }
        let tag = handle::tag(nic, raw)?;
        if self.ptags.contains_key(&tag) { Ok(Some(tag)) } else { Err(Code::InvalidPtag) }
    }
}

fn create_ptag(raw: VIP_PVOID, out: *mut VIP_PVOID) -> Outcome {
    let nic = handle::nic(raw)?.here()?;
    if out.is_null() {
        return Err(Code::InvalidParameter);
    }
    let mut state = nic.lock();
    if state.ptags.len() >= MAX_PTAGS {
        return Err(Code::ErrorResource);
    }
    let is_base = !state.ptags.values().any(|ptag| ptag.is_base);
    let domain = match is_base {
        true => nic.base.clone(),
        false => nic.device.protection_domain().map_err(report)?,
    };
    let id = handle::fresh();
    state.ptags.insert(id, Ptag { domain, is_base });
    give(out, nic.handle_of(Kind::Ptag, id))
}

fn destroy_ptag(raw: VIP_PVOID, tag: VIP_PVOID) -> Outcome {
    let nic = handle::nic(raw)?;
    let mut state = nic.lock();
    let tag = state.tag(&nic, tag).ok().flatten().ok_or(Code::InvalidParameter)?;
    let is_used = state.vis.values().any(|vi| vi.tag == Some(tag))
        || state.regions.values().any(|region| region.uses(tag));
    if is_used {
        return Err(Code::ErrorResource);
    }
    state.ptags.remove(&tag);
    Ok(())
}

fn register_mem(
    raw: VIP_PVOID,
    addr: VIP_PVOID,
    len: u64,
    attributes: *const VIP_MEM_ATTRIBUTES,
    out: *mut u32,
) -> Outcome {
    let nic = handle::nic(raw)?.here()?;
    let addr = addr as u64;
    if out.is_null() || addr == 0 || len == 0 || addr.checked_add(len).is_none() {
        return Err(Code::InvalidParameter);
    }
    let (tag, rights, domain) = {
        let state = nic.lock();
        let (tag, rights) = checked(&nic, &state, attributes)?;
        if state.regions.len() >= MAX_REGIONS {
            return Err(Code::ErrorResource);
        }
        let domain = state.domain(&nic, tag).ok_or(Code::InvalidPtag)?;
        (tag, rights, domain)
    };
    let own = register(&domain, addr, len, rights).map_err(|error| match error {
        quipu::Error::Engine(quipu::EngineError::BadAddress) => Code::InvalidParameter,
        error => report(error),
    })?;
    let Key(key) = own.key();
    let others = HashMap::new();
    nic.lock().regions.insert(key, Region { addr, len, tag, rights, own, others });
    give(out, key)
}

/// The region of a handle that begins at this address.
fn region(state: &mut State, addr: VIP_PVOID, handle: u32) -> Outcome<&mut Region> {
    let region = state.regions.get_mut(&handle).filter(|region| region.addr == addr as u64);
    region.ok_or(Code::InvalidParameter)
}

fn deregister_mem(raw: VIP_PVOID, addr: VIP_PVOID, handle: u32) -> Outcome {
    let nic = handle::nic(raw)?;
    let removed = {
        let mut state = nic.lock();
        region(&mut state, addr, handle)?;
        state.regions.remove(&handle)
    };
    // Deregistering waits for peers that are in the middle of an access: without the lock.
    drop(removed);
    Ok(())
}

fn set_mem_attributes(
    raw: VIP_PVOID,
    addr: VIP_PVOID,
    handle: u32,
    attributes: *const VIP_MEM_ATTRIBUTES,
) -> Outcome {
    let nic = handle::nic(raw)?;
    let mut state = nic.lock();
    region(&mut state, addr, handle)?;
    let (tag, rights) = checked(&nic, &state, attributes)?;
    let domain = state.domain(&nic, tag).ok_or(Code::InvalidPtag)?;
    let region = region(&mut state, addr, handle)?;
    region.own.change(&domain, rights.access()).map_err(report)?;
    (region.tag, region.rights) = (tag, rights);
    region.others.clear();
    Ok(())
}

fn query_mem(
    raw: VIP_PVOID,
    addr: VIP_PVOID,
    handle: u32,
    out: *mut VIP_MEM_ATTRIBUTES,
) -> Outcome {
    let nic = handle::nic(raw)?;
    let mut state = nic.lock();
    let region = region(&mut state, addr, handle)?;
    let attributes = VIP_MEM_ATTRIBUTES {
        ptag: region.tag.map_or(std::ptr::null_mut(), |tag| nic.handle_of(Kind::Ptag, tag)),
        enable_rdma_write: i32::from(region.rights.write),
        enable_rdma_read: i32::from(region.rights.read),
    };
    give(out, attributes)
}

entry! {
    /// `VipCreatePtag`
    fn VipCreatePtag(nic: VIP_PVOID, out: *mut VIP_PVOID) -> VipReturn {
        code(create_ptag(nic, out))
    }

    /// `VipDestroyPtag`
    fn VipDestroyPtag(nic: VIP_PVOID, tag: VIP_PVOID) -> VipReturn {
        code(destroy_ptag(nic, tag))
    }

    /// `VipRegisterMem`
    fn VipRegisterMem(
        nic: VIP_PVOID,
        addr: VIP_PVOID,
        len: c_ulong,
        attributes: *const VIP_MEM_ATTRIBUTES,
        out: *mut u32,
    ) -> VipReturn {
        code(register_mem(nic, addr, len, attributes, out))
    }

    /// `VipDeregisterMem`
    fn VipDeregisterMem(nic: VIP_PVOID, addr: VIP_PVOID, handle: u32) -> VipReturn {
        code(deregister_mem(nic, addr, handle))
    }

    /// `VipSetMemAttributes`
    fn VipSetMemAttributes(
        nic: VIP_PVOID,
        addr: VIP_PVOID,
        handle: u32,
        attributes: *const VIP_MEM_ATTRIBUTES,
    ) -> VipReturn {
        code(set_mem_attributes(nic, addr, handle, attributes))
    }

    /// `VipQueryMem`
    fn VipQueryMem(
        nic: VIP_PVOID,
        addr: VIP_PVOID,
        handle: u32,
        out: *mut VIP_MEM_ATTRIBUTES,
    ) -> VipReturn {
        code(query_mem(nic, addr, handle, out))
    }
}
