//! What a request is answered with, of what there is to show.

use std::ops::Range;
use std::sync::Arc;

use super::conditions::Version;
use super::files::{Content, Data, Otherwise, Source};
use super::http::{Refusal, Request, Status};

/// What goes back.
pub(super) struct Response {
    pub(super) status: Status,
    pub(super) media_type: &'static str,
    /// Of what there is to show, without its tag.
    pub(super) version: Version<'static>,
    pub(super) tag: Option<String>,
    pub(super) location: Option<String>,
    pub(super) part: Option<(Range<u64>, u64)>,
    pub(super) len: u64,
    /// The content, and the octets of it that are sent.
    pub(super) data: Data,
    pub(super) range: Range<u64>,
    pub(super) keep_alive: bool,
}

impl Response {
    /// One that says its status, for people too.
    fn refusal(status: Status, keep_alive: bool, head_only: bool) -> Self {
        let line = status.line();
        let page: Arc<str> =
            format!("<!DOCTYPE html>\n<title>{line}</title>\n<h1>{line}</h1>\n").into();
        let len = page.len() as u64;
        Self {
            media_type: "text/html; charset=utf-8",
            len,
            range: 0..if head_only { 0 } else { len },
            data: Data::Page(page),
            ..Self::bare(status, keep_alive)
        }
    }

    /// One that consists of its status only.
    fn bare(status: Status, keep_alive: bool) -> Self {
        Self {
            status,
            media_type: "text/plain; charset=utf-8",
            version: Version::default(),
            tag: None,
            location: None,
            part: None,
            len: 0,
            data: Data::Nothing,
            range: 0..0,
            keep_alive,
        }
    }
}

/// Answers a request, or a refusal to read one.
pub(super) fn answer(source: &mut Source, request: &Result<Request, Refusal>) -> Response {
    let request = match request {
        Ok(request) => request,
        Err(Refusal { status, head_only }) => {
            return Response::refusal(*status, false, *head_only);
        }
    };
    let content = match source.find(&request.path) {
        Ok(content) => content,
        Err(Otherwise::Refused(status)) => {
            return Response::refusal(status, request.keep_alive, request.head_only);
        }
        Err(Otherwise::Moved(to)) => {
            let moved = Response::bare(Status::MovedPermanently, request.keep_alive);
            return Response { location: Some(to + &request.query), ..moved };
        }
    };
    let len = content.len;
    let response = present(content, request);
    if response.range == (0..len) {
        return Response { data: source.keep(response.data), ..response };
    }
    response
}

fn present(content: Content, request: &Request) -> Response {
    let Content { media_type, version, tag, len, data } = content;
    let tagged = Version { tag: tag.as_deref(), ..version };
    let judged = request.conditions.judge(tagged);
    if judged == Some(Status::PreconditionFailed) {
        let Request { keep_alive, head_only, .. } = *request;
        return Response::refusal(Status::PreconditionFailed, keep_alive, head_only);
    }
    let wants_part = !request.head_only && request.conditions.allows_part(tagged);
    let base =
        Response { media_type, version, tag, ..Response::bare(Status::Ok, request.keep_alive) };
    if let Some(status) = judged {
        return Response { status, ..base };
    }
    let (status, range) = match request.part.filter(|_| wants_part) {
        None => (Status::Ok, 0..len),
        Some(part) => match part.of(len) {
            Some(range) => (Status::PartialContent, range),
            None => (Status::RangeNotSatisfiable, 0..0),
        },
    };
    let part = (status != Status::Ok).then(|| (range.clone(), len));
    let (shown, sent) = (range.end - range.start, if request.head_only { 0..0 } else { range });
    Response { status, part, len: shown, data, range: sent, ..base }
}
