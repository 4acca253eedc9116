//! Static files for browsers. They hold no secret, so they are served without the key; a page reads
//! the key from its link and sends it with every call.

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Response, StatusCode, header};
use axum::middleware::{self, Next};
use axum::routing::get;
use sha2::{Digest, Sha256};

use crate::auth::names_an_address;
use crate::error::ApiError;

/// File of a page, part of the program.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::exhaustive_structs)] // Constants of the program.
pub struct Page {
    /// Path of the URL, beginning with `/`.
    pub path: &'static str,
    /// Media type.
    pub kind: &'static str,
    pub bytes: &'static [u8],
}

/// Rights of a page: it may run and load its own files only, and nothing may embed it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
                      connect-src 'self'; img-src 'self' data:; manifest-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Hosts under which browsers get the pages, against DNS rebinding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hosts {
    /// Names and addresses of this machine only.
    ThisMachine,
    /// Any IP address: a name that an attacker lets point here is not an address.
    Addresses,
    Any,
}

/// Routes of `pages`, under these hosts.
pub(crate) fn routes(pages: &'static [Page], hosts: Hosts) -> Router {
    let guard = middleware::from_fn_with_state(hosts, guard);
    pages.iter().fold(Router::new(), |router, page| {
        let tag = format!("\"{:.32}\"", hex(&Sha256::digest(page.bytes)));
        let answer = move |request: Request| std::future::ready(answer(page, &tag, &request));
        router.route(page.path, get(answer).layer(guard.clone()))
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Refuses host names that an attacker may control (DNS rebinding).
async fn guard(State(hosts): State<Hosts>, request: Request, next: Next) -> Response<Body> {
    let local = hosts == Hosts::ThisMachine;
    if hosts == Hosts::Any || names_an_address(&request, local) {
        return next.run(request).await;
    }
    let text = match local {
        true => "without a key the page is at 127.0.0.1 or localhost only",
        false => {
            "open the page by the address of this machine, for example http://192.168.1.5:7602"
        }
    };
    ApiError::new(StatusCode::FORBIDDEN, "forbidden_host", text).response()
}

/// The file, or 304 if the browser has it. Browsers ask each time, so a new version of the program
/// has its new page at once.
fn answer(page: &Page, tag: &str, request: &Request) -> Response<Body> {
    let mut known = request.headers().get_all(header::IF_NONE_MATCH).iter();
    let is_known = |known: &HeaderValue| {
        let mut tags = known.to_str().unwrap_or_default().split(',');
        tags.any(|one| one.trim().trim_start_matches("W/") == tag)
    };
    let known = known.any(is_known);
    let body = match known {
        true => Body::empty(),
        false => Body::from(page.bytes),
    };
    let mut response = Response::new(body);
    if known {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    }
    let headers = response.headers_mut();
    let fixed = [
        (header::CONTENT_TYPE, page.kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if let Ok(tag) = HeaderValue::from_str(tag) {
        headers.insert(header::ETAG, tag);
    }
    response
}
