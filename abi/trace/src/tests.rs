//! Lines of calls, as text and as JSON.

use std::time::Duration;

use quipu_abi_types::*;
use quipu_cabi::{Errno, IntErrno, IntMinusOne, Null};

use crate::call::Finished;
use crate::show::Show;
use crate::value::Value;

fn line(result: Option<Value>, errno: Option<Errno>) -> Finished<'static> {
    let record = Value::Record(vec![("b", Value::Hex(16)), ("c", Value::Word("NAME".into()))]);
    let args = vec![
        ("list", Value::List(vec![record, Value::Null])),
        ("text", Value::Text("say \"hi\"\n".into())),
        ("data", Value::Bytes(vec![1, 0xab])),
    ];
    Finished {
        function: "ibv_test",
        args,
        result,
        errno,
        began: Duration::from_micros(12_000_034),
        lasted: Duration::from_nanos(1_500),
        times: 1,
    }
}

#[test]
fn a_line_of_text_reads_like_that_of_strace() {
    let text = line(Some(Value::Number(-1)), Some(Errno::EAGAIN)).text();
    let (time, rest) = text.split_once(' ').unwrap();
    assert_eq!(time, "12.000034");
    let (who, rest) = rest.split_once(' ').unwrap();
    assert_eq!(who.split('/').next().unwrap(), std::process::id().to_string());
    assert_eq!(
        rest,
        "ibv_test(list=[{b=0x10, c=NAME}, NULL], text=\"say \\\"hi\\\"\\n\", data=01ab) = -1 EAGAIN \
         <0.000001>\n"
    );
}

#[test]
fn a_line_of_json_is_json() {
    let json = line(None, None).json();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["call"], "ibv_test");
    assert_eq!(json["time"], 12.000034);
    assert_eq!(json["args"]["list"], serde_json::json!([{ "b": "0x10", "c": "NAME" }, null]));
    assert_eq!(json["args"]["text"], "say \"hi\"\n");
    assert_eq!(json["args"]["data"], "01ab");
    assert_eq!(json["duration_ns"], 1500);
    assert!(json.get("result").is_none() && json.get("errno").is_none());
    let failed = line(Some(Value::Null), Some(Errno::ENOMEM)).json();
    let failed: serde_json::Value = serde_json::from_str(&failed).unwrap();
    assert_eq!((&failed["result"], &failed["errno"]), (&serde_json::Value::Null, &"ENOMEM".into()));
}

crate::entry! {
    /// Fails with an error number of its argument.
    fn fails(number: i32) -> IntErrno {
        if number == 0 { Ok(()) } else { Err(Errno(number)) }
    }
    /// As above.
    fn minus_one(number: i32) -> IntMinusOne {
        if number >= 0 { Ok(number) } else { Err(Errno::EBUSY) }
    }
    /// As above.
    fn null(object: *mut ibv_qp) -> Null<ibv_qp> {
        if object.is_null() { Err(Errno::ENOMEM) } else { Ok(object) }
    }
}

#[test]
fn tracing_leaves_results_and_errno_alone() {
    let calls = |number: i32| -> i32 {
        Errno(77).set();
        let args = crate::args!(number: i32);
        // SAFETY: the arguments are numbers.
        unsafe { crate::traced::<IntErrno>("fails", args, || fails(number)) }
    };
    assert_eq!((calls(0), Errno::last()), (0, Errno(77)));
    assert_eq!((calls(libc::EBUSY), Errno::last()), (libc::EBUSY, Errno::EBUSY));
}

#[test]
fn errors_are_told_from_results_by_the_convention() {
    use quipu_cabi::CReturn;
    assert_eq!(IntErrno::error(&0), None);
    assert_eq!(IntErrno::error(&libc::EINVAL), Some(Errno::EINVAL));
    // SAFETY: the arguments are numbers and null.
    unsafe {
        assert_eq!(IntMinusOne::error(&minus_one(3)), None);
        assert_eq!(IntMinusOne::error(&minus_one(-3)), Some(Errno::EBUSY));
        assert_eq!(Null::error(&null(std::ptr::null_mut())), Some(Errno::ENOMEM));
    }
}

/// What is shown of an argument of `function` before the call, or after it.
fn shown(
    value: &dyn Show,
    function: &str,
    args: &[crate::Arg<'_>],
    result: Option<i128>,
) -> String {
    let call = crate::Call::new(function, args, result, false);
    // SAFETY: the tests pass what is valid.
    unsafe { value.show(&call, "") }.to_string()
}

#[test]
fn work_requests_are_shown_with_what_their_opcode_uses() {
    let mut sge = ibv_sge { addr: 0x1000, length: 8, lkey: 7 };
    let mut second = request();
    (second.wr_id, second.opcode, second.imm_data) = (2, IBV_WR_SEND_WITH_IMM, 5u32.to_be());
    let mut first = request();
    (first.wr_id, first.opcode, first.next) = (1, IBV_WR_RDMA_WRITE, &mut second);
    (first.sg_list, first.num_sge) = (&mut sge, 1);
    first.send_flags = IBV_SEND_SIGNALED | IBV_SEND_FENCE;
    first.wr.rdma = ibv_send_wr_rdma { remote_addr: 0x2000, rkey: 9 };
    let list: *mut ibv_send_wr = &mut first;
    assert_eq!(
        shown(&list, "ibv_post_send", &[], None),
        "[{wr_id=0x1, opcode=IBV_WR_RDMA_WRITE, send_flags=IBV_SEND_FENCE|IBV_SEND_SIGNALED, \
         sg_list=[{addr=0x1000, length=8, lkey=0x7}], remote_addr=0x2000, rkey=0x9}, \
         {wr_id=0x2, opcode=IBV_WR_SEND_WITH_IMM, sg_list=NULL, imm_data=0x5}]"
    );
}

#[test]
fn a_datagram_is_shown_with_its_peer() {
    // SAFETY: all fields are numbers, pointers, and what pthread objects consist of.
    let mut qp: ibv_qp = unsafe { std::mem::zeroed() };
    let raw: *mut ibv_qp = &mut qp;
    let mut wr = request();
    (wr.wr_id, wr.opcode) = (2, IBV_WR_SEND);
    wr.wr.ud =
        ibv_send_wr_ud { ah: std::ptr::null_mut(), remote_qpn: 0x12, remote_qkey: 0x1111_1111 };
    wr.qp_type.xrc.remote_srqn = 0x34;
    let list: *mut ibv_send_wr = &mut wr;
    let of = |qp_type| {
        // SAFETY: it is alive.
        unsafe { (*raw).qp_type = qp_type };
        shown(&list, "ibv_post_send", crate::args!(raw: *mut ibv_qp), None)
    };
    assert_eq!(of(IBV_QPT_RC), "[{wr_id=0x2, opcode=IBV_WR_SEND, sg_list=NULL}]");
    assert!(of(IBV_QPT_UD).ends_with("ah=NULL, remote_qpn=0x12, remote_qkey=0x11111111}]"));
    assert!(of(IBV_QPT_XRC_SEND).ends_with("sg_list=NULL, remote_srqn=0x34}]"));
}

#[test]
fn private_data_are_shown_and_memory_is_not() {
    let bytes = [0xab_u8, 0xcd, 0xef];
    let data: *const libc::c_void = bytes.as_ptr().cast();
    let private_data_len = 2_u8;
    let args = crate::args!(private_data_len: u8);
    assert_eq!(shown(&data, "rdma_reject", args, None), "abcd");
    assert_eq!(shown(&data, "rsend", &[], None), format!("{:#x}", data.addr()));
}

#[test]
fn what_a_call_fills_in_is_shown_after_it() {
    // SAFETY: all fields are numbers.
    let mut attr: ibv_ah_attr = unsafe { std::mem::zeroed() };
    let out: *mut ibv_ah_attr = &mut attr;
    let after = |function| out.is_output(&crate::Call::new(function, &[], None, false), "out");
    assert!(after("ibv_init_ah_from_wc") && !after("ibv_create_ah"));
}

/// A thread that has jumped out of a call that waits is traced on.
#[test]
fn a_call_that_waits_may_be_left() {
    let left = std::panic::catch_unwind(|| {
        // SAFETY: no arguments.
        unsafe {
            crate::traced_wait::<IntErrno>("waits", &[], || std::panic::resume_unwind(Box::new(0)))
        }
    });
    assert!(left.is_err() && !crate::call::is_inside());
}

fn request() -> ibv_send_wr {
    // SAFETY: all fields are numbers and pointers, for which zeros are valid.
    unsafe { std::mem::zeroed() }
}

#[test]
fn completions_are_shown_as_many_as_were_found() {
    // SAFETY: all fields are numbers.
    let mut wc: [ibv_wc; 2] = unsafe { std::mem::zeroed() };
    wc[0].wr_id = 3;
    wc[0].status = IBV_WC_WR_FLUSH_ERR;
    wc[0].qp_num = 0x11;
    let list: *mut ibv_wc = wc.as_mut_ptr();
    assert_eq!(
        shown(&list, "ibv_poll_cq", &[], Some(1)),
        "[{wr_id=0x3, status=IBV_WC_WR_FLUSH_ERR, qp_num=0x11, vendor_err=0x0}]"
    );
    assert_eq!(shown(&list, "ibv_poll_cq", &[], Some(0)), "[]");
}

#[test]
fn attributes_are_shown_that_the_mask_names() {
    // SAFETY: all fields are numbers.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    (attr.qp_state, attr.port_num, attr.timeout) = (IBV_QPS_INIT, 1, 14);
    let mask = (IBV_QP_STATE | IBV_QP_PORT) as i32;
    let attr: *mut ibv_qp_attr = &mut attr;
    let args = crate::args!(mask: i32);
    let text = shown(&attr, "ibv_modify_qp", args, None);
    assert_eq!(text, "{qp_state=IBV_QPS_INIT, port_num=1}");
}

#[test]
fn what_a_function_ends_is_not_followed() {
    let dangling = std::ptr::without_provenance_mut::<rdma_cm_event>(0x40);
    assert_eq!(shown(&dangling, "rdma_ack_cm_event", &[], None), "0x40");
    let nothing: *mut ibv_send_wr = std::ptr::null_mut();
    assert_eq!(shown(&nothing, "ibv_post_send", &[], None), "NULL");
}

#[test]
fn an_address_that_is_cut_off_is_not_read_to_its_end() {
    // SAFETY: the kernel chooses the place, and both pages are ours.
    let page = unsafe {
        let (bits, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANON);
        let pages = libc::mmap(std::ptr::null_mut(), 8192, bits, kind, -1, 0).cast::<u8>();
        assert_eq!(libc::munmap(pages.add(4096).cast(), 4096), 0);
        pages
    };
    // SAFETY: within the page.
    let (address, cut) = unsafe { (page.cast::<libc::sockaddr_in>(), page.add(4094)) };
    // SAFETY: as above.
    unsafe {
        (*address).sin_family = libc::AF_INET as u16;
        (*address).sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
        cut.cast::<u16>().write(libc::AF_INET as u16);
    }
    let of = |place: *mut u8| shown(&place.cast::<libc::sockaddr>(), "rgetsockname", &[], None);
    assert_eq!(of(page.cast()), "127.0.0.1:0");
    assert_eq!(of(cut), format!("{:#x}", cut.addr()));
    // SAFETY: it is ours, and used no more.
    unsafe { libc::munmap(page.cast(), 4096) };
}
