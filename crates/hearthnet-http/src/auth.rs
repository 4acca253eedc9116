//! Access control: the API key, named keys or, without a key, requests from this machine that name it
//! as host.
//! Requests that a browser sends for a page of another origin are refused, unless the origin is listed.

use std::hash::{BuildHasher as _, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::uri::{Authority, Uri};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};
use axum::middleware::{self, Next};
use axum::routing::MethodRouter;
use hearthnet_platform::peer::{User, user_of};
use hearthnet_transport::subscriber;

use super::error::{ApiError, format_errors};
use super::keys::{ApiKey, NamedKeys, PresentedKey};

/// Origin of a request.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Client {
    /// Address of the client; one fixed address for all of this machine's.
    pub ip: IpAddr,
    /// Quota key of the address: for IPv6, its network.
    pub subscriber: IpAddr,
    /// User of this machine behind the connection, if there is no key, the connection is local and
    /// the system names the user.
    pub user: Option<User>,
    /// Number of the connection, unique within this listener.
    pub number: u64,
    /// Named key of the request.
    pub key: Option<PresentedKey>,
    /// Whether the connection came over the Unix socket, which no browser uses.
    pub(crate) by_socket: bool,
    /// Addresses of the client and of this program, if known.
    pub(crate) ends: Option<(SocketAddr, SocketAddr)>,
}

impl Client {
    /// A client at this address, on the connection of this number.
    pub fn new(ip: IpAddr, user: Option<User>, number: u64) -> Self {
        Self {
            ip,
            subscriber: subscriber(ip),
            user,
            number,
            key: None,
            by_socket: false,
            ends: None,
        }
    }

    /// Whether the system names the user of this program as the one behind the connection, with a
    /// key as well, but not with a named key. Reads the system's table of sockets if there is a key.
    pub fn is_owner(&self) -> bool {
        let look_up = || self.ends.and_then(|(peer, own)| user_of(peer, own));
        let user = self.user.or_else(look_up);
        self.key.is_none() && user.is_some_and(|user| user.is_owner)
    }
}

/// Whether the client is authorised. `/healthz` answers other clients too, but without the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted(pub(crate) bool);

impl Admitted {
    pub fn is(self) -> bool {
        self.0
    }
}

/// Rules of access of one listener.
#[derive(Debug, Clone)]
pub(super) struct Access {
    /// Key that clients must send.
    pub(super) key: Option<ApiKey>,
    /// Further keys, in force if there is `key`.
    pub(super) named: Option<NamedKeys>,
    /// Names that `Host` may have without a key, besides those of this machine.
    pub(super) hosts: Arc<[String]>,
    /// Origins of web pages that may use the paths under `/v1/`.
    pub(super) origins: Arc<[String]>,
}

impl Access {
    /// Whether the client presents a key, or needs none: its named key, if it is one.
    fn shown_key(&self, request: &Request) -> Result<Option<PresentedKey>, ()> {
        let Some(key) = &self.key else {
            return Ok(None);
        };
        if let Some(guess) = presented(request.headers()).map(ApiKey::presented) {
            if key.is(&guess) {
                return Ok(None);
            }
            if let Some(named) = self.named.as_ref().and_then(|named| named.find(&guess)) {
                return Ok(Some(named));
            }
        }
        // The system has proved who it is.
        let client = by_socket(request);
        let is_owner = client.is_some_and(|client| client.user.is_some_and(|user| user.is_owner));
        is_owner.then_some(None).ok_or(())
    }

    /// True if the request names this machine, or needs not.
    fn names_this_machine(&self, request: &Request) -> bool {
        let is_listed = |host: &str| {
            let name = host_name(host);
            name.is_some_and(|name| {
                self.hosts
                    .iter()
                    .any(|host| host.eq_ignore_ascii_case(&name))
            })
        };
        self.key.is_some()
            || by_socket(request).is_some()
            || names_an_address(request, true)
            || host(request).is_some_and(is_listed)
    }

    /// Origin of the web page that sends the request, if it may use the path.
    fn listed_origin(&self, request: &Request) -> Option<HeaderValue> {
        let origin = request.headers().get(header::ORIGIN)?;
        let is_listed = self
            .origins
            .iter()
            .any(|listed| listed.as_bytes() == origin.as_bytes());
        (is_listed && request.uri().path().starts_with("/v1/")).then(|| origin.clone())
    }
}

/// Router with the paths of `inner` for authorised clients, and `/healthz`, `/health` and `pages`
/// for all. Doubled and trailing slashes of a path have no meaning.
pub(super) fn guarded(
    inner: Router,
    access: Access,
    health: MethodRouter,
    pages: Router,
) -> Router {
    let health = health.layer(middleware::from_fn_with_state(access.clone(), mark));
    let router = inner
        .method_not_allowed_fallback(no_method)
        .fallback(no_path)
        .layer(middleware::from_fn_with_state(access, guard))
        .route("/health", health.clone())
        .route("/healthz", health)
        .merge(pages)
        .method_not_allowed_fallback(no_method)
        .layer(middleware::from_fn(format_errors))
        .layer(middleware::from_fn(count))
        .layer(middleware::map_response(is_no_page))
        .layer(middleware::from_fn(number));
    // Layers of a router run after its choice of a route, so the path is changed by another router.
    Router::new()
        .fallback_service(router)
        .layer(middleware::map_request(plain_path))
}

/// Removes doubled and trailing slashes from the path.
async fn plain_path(mut request: Request) -> Request {
    let path = request.uri().path();
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let plain = format!("/{}", parts.join("/"));
    if path.starts_with('/') && plain != path {
        let target = match request.uri().query() {
            Some(query) => format!("{plain}?{query}"),
            None => plain,
        };
        let mut parts = request.uri().clone().into_parts();
        parts.path_and_query = target.parse().ok();
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
    }
    request
}

/// Longest request id that is returned, in bytes.
const MAX_ID_BYTES: usize = 128;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Returns the client's `x-request-id`, or a new random one.
async fn number(request: Request, next: Next) -> Response<Body> {
    let fits = |id: &&HeaderValue| {
        (1..=MAX_ID_BYTES).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    let sent = request.headers().get(REQUEST_ID).filter(fits).cloned();
    let id = sent.or_else(|| {
        // Each state has random keys.
        let random = RandomState::new().hash_one(0);
        HeaderValue::try_from(format!("req-{random:016x}")).ok()
    });
    let mut response = next.run(request).await;
    if let Some(id) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Marks every response but those of the page as data of its type, so that a browser that is led
/// here shows untrusted text and runs no script in it. No other site may embed or read a response,
/// and none learns from which path a link was followed.
async fn is_no_page(mut response: Response<Body>) -> Response<Body> {
    let headers = response.headers_mut();
    let fixed = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (OPENER, "same-origin"),
        (RESOURCE, "same-origin"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    let nothing = HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'; sandbox");
    headers
        .entry(header::CONTENT_SECURITY_POLICY)
        .or_insert(nothing);
    response
}

const OPENER: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
const RESOURCE: HeaderName = HeaderName::from_static("cross-origin-resource-policy");

async fn no_path() -> Response<Body> {
    let text =
        "there is nothing at this path; GET /openapi.json lists the paths of `hearthnet serve`";
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", text).response()
}

async fn no_method() -> Response<Body> {
    let text = "this path does not take that method";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", text).response()
}

/// Client of a request that came over the Unix socket.
fn by_socket(request: &Request) -> Option<&Client> {
    let client = request.extensions().get::<Client>();
    client.filter(|client| client.by_socket)
}

/// Named key of an admitted request, or the reason to refuse the request.
fn admit(access: &Access, request: &Request) -> Result<Option<PresentedKey>, ApiError> {
    let shown = access.shown_key(request);
    let changes = |path: &str| path.starts_with("/hearthnet/") && request.method() != Method::GET;
    let (status, code, text) = match &shown {
        Err(()) => (
            StatusCode::UNAUTHORIZED,
            "invalid_api_key",
            "this server asks for its key: send it as `Authorization: Bearer KEY`, `api-key: KEY` or `x-api-key: KEY`",
        ),
        // DNS rebinding: a web page's own host name that resolves to this machine must not be
        // served.
        Ok(_) if !access.names_this_machine(request) => (
            StatusCode::FORBIDDEN,
            "forbidden_host",
            "without a key this server answers as localhost only; ask http://127.0.0.1 or http://localhost, or list the name in http.allowed_hosts",
        ),
        Ok(_) if access.listed_origin(request).is_none() && is_cross_site(request) => (
            StatusCode::FORBIDDEN,
            "forbidden_origin",
            "a web page of another origin may not use this server; open this server's own page, or list the origin in http.cors_origins",
        ),
        Ok(Some(_)) if changes(request.uri().path()) => (
            StatusCode::FORBIDDEN,
            "unauthorized",
            "a named key changes nothing of this node; that takes the key of http.api_key_file",
        ),
        Ok(named) => return Ok(named.clone()),
    };
    Err(ApiError::new(status, code, text))
}

/// Refuses requests that are not authorised.
async fn guard(State(access): State<Access>, mut request: Request, next: Next) -> Response<Body> {
    let origin = access.listed_origin(&request);
    // A browser sends a preflight without the key.
    if let Some(origin) = &origin
        && is_preflight(&request)
        && access.names_this_machine(&request)
    {
        return preflight(&request, origin.clone());
    }
    let mut response = match admit(&access, &request) {
        Err(error) => error.response(),
        Ok(named) => {
            if let Some(client) = request.extensions_mut().get_mut::<Client>() {
                client.key = named;
            }
            next.run(request).await
        }
    };
    if let Some(origin) = origin {
        share(&mut response, origin);
        let shown = HeaderValue::from_static("retry-after, x-hearthnet-answered-by, x-request-id");
        let name = header::ACCESS_CONTROL_EXPOSE_HEADERS;
        response.headers_mut().insert(name, shown);
    }
    response
}

fn is_preflight(request: &Request) -> bool {
    let method = header::ACCESS_CONTROL_REQUEST_METHOD;
    request.method() == Method::OPTIONS && request.headers().contains_key(method)
}

/// Allows the listed origin to send its request.
fn preflight(request: &Request, origin: HeaderValue) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    share(&mut response, origin);
    let headers = response.headers_mut();
    let methods = HeaderValue::from_static("GET, HEAD, POST");
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    let asked = header::ACCESS_CONTROL_REQUEST_HEADERS;
    if let Some(names) = request.headers().get(asked) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    let minutes = HeaderValue::from_static("600");
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, minutes);
    response
}

/// Lets pages of the listed origin read the response.
fn share(response: &mut Response<Body>, origin: HeaderValue) {
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(header::VARY, HeaderValue::from_static("origin"));
}

/// Passes every request on, with its [`Admitted`].
async fn mark(State(access): State<Access>, mut request: Request, next: Next) -> Response<Body> {
    let admitted = Admitted(admit(&access, &request).is_ok());
    request.extensions_mut().insert(admitted);
    next.run(request).await
}

async fn count(request: Request, next: Next) -> Response<Body> {
    let response = next.run(request).await;
    let status = response.status().as_u16().to_string();
    ::metrics::counter!("hearthnet_http_responses_total", "status" => status).increment(1);
    response
}

/// Key in `Authorization: Bearer`, else in `api-key`, else in `x-api-key`.
fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    let plain = |name: &'static str| headers.get(name).map(HeaderValue::as_bytes);
    bearer(headers)
        .or_else(|| plain("api-key"))
        .or_else(|| plain("x-api-key"))
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key)
}

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// True if a browser sent the request for a page of another origin. Programs that are no browsers
/// send neither of the two headers.
fn is_cross_site(request: &Request) -> bool {
    let text = |name: &HeaderName| request.headers().get(name).map(HeaderValue::as_bytes);
    match text(&FETCH_SITE) {
        Some(site) => !matches!(site, b"same-origin" | b"none"),
        None => text(&header::ORIGIN).is_some_and(|origin| {
            let schemes = [&b"http://"[..], b"https://"];
            let at = schemes
                .iter()
                .find_map(|scheme| origin.strip_prefix(*scheme));
            at.is_none() || at != host(request).map(str::as_bytes)
        }),
    }
}

/// Host that the request names; `None` if it names none, or two.
fn host(request: &Request) -> Option<&str> {
    let mut headers = request.headers().get_all(header::HOST).iter();
    let header = headers.next().and_then(|host| host.to_str().ok());
    // The host in the request line takes precedence (RFC 9112, section 3.2.2).
    let named = request.uri().authority().map(Authority::as_str);
    // With two `Host` headers, a proxy may have used the other one.
    named.or(header).filter(|_| headers.next().is_none())
}

/// True if the request names `localhost`, a loopback address or, unless it must be `local`, any
/// other IP address.
pub(super) fn names_an_address(request: &Request, local: bool) -> bool {
    host(request).is_some_and(|host| is_address(host, local))
}

/// True if a `Host` is `localhost`, a loopback address or, unless it must be `local`, any other IP
/// address, with or without a port.
fn is_address(host: &str, local: bool) -> bool {
    let Some(name) = host_name(host) else {
        return false;
    };
    let v6 = name
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let ip = match v6 {
        Some(v6) => v6.parse::<Ipv6Addr>().map(IpAddr::V6),
        None => name.parse::<Ipv4Addr>().map(IpAddr::V4),
    };
    ip.is_ok_and(|ip| !local || ip.is_loopback()) || name.eq_ignore_ascii_case("localhost")
}

/// Name or address in a `Host`, with or without a port. `None` if something else stands around it.
fn host_name(host: &str) -> Option<String> {
    let authority = host.parse::<Authority>().ok()?;
    let name = authority.host();
    // Refuses text before the name (as in `NAME:PASSWORD@HOST`). Only a port may follow the name.
    let port = match authority.as_str().strip_prefix(name) {
        Some("") => true,
        Some(rest) => rest.strip_prefix(':').is_some_and(|port| {
            port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok()
        }),
        None => false,
    };
    port.then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_pass_for_it() {
        let here = "localhost LocalHost:7602 127.0.0.1 127.8.9.10:1 [::1] [::1]:7602";
        for host in here.split(' ') {
            assert!(is_address(host, true), "{host}");
            assert!(is_address(host, false), "{host}");
        }
        let elsewhere = ":80 evil.com localhost.evil.com 127.0.0.1.evil.com [::1]evil.com \
                         [::1].evil.com:80 [::1]:80:evil.com localhost:80@evil.com \
                         localhost@evil.com evil.com@localhost localhost:evil.com localhost: \
                         localhost:+80 localhost:99999 localhost/evil.com [127.0.0.1] ::1 \
                         hearth.local";
        for host in elsewhere.split(' ').chain(["", "localhost "]) {
            assert!(!is_address(host, true), "{host}");
            assert!(!is_address(host, false), "{host}");
        }
        for host in [
            "0.0.0.0",
            "192.168.0.9",
            "192.168.0.9:7602",
            "[fe80::1]:7602",
        ] {
            assert!(!is_address(host, true), "{host}");
            assert!(is_address(host, false), "{host}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_owner_is_known_with_a_key_and_other_machines_are_never_the_owner() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap();
        let _client = std::net::TcpStream::connect(own).unwrap();
        let (_accepted, peer) = listener.accept().unwrap();
        let far = SocketAddr::from(([192, 0, 2, 1], 40_000));
        for (peer, is_owner) in [(peer, true), (far, false)] {
            let client = Client {
                ends: Some((peer, own)),
                ..Client::new(peer.ip(), None, 1)
            };
            assert_eq!(client.is_owner(), is_owner, "{peer}");
        }
        assert!(!Client::new(own.ip(), None, 1).is_owner());
    }

    #[test]
    fn a_browser_is_refused_for_a_page_of_another_origin_and_programs_are_not() {
        let is_cross_site = |headers: &[(&str, &str)]| {
            let mut request = Request::builder().uri("/v1/models");
            for (name, value) in [("host", "127.0.0.1:7602")].iter().chain(headers) {
                request = request.header(*name, *value);
            }
            is_cross_site(&request.body(Body::empty()).unwrap())
        };
        assert!(!is_cross_site(&[]));
        assert!(!is_cross_site(&[("origin", "http://127.0.0.1:7602")]));
        for site in ["same-origin", "none"] {
            assert!(!is_cross_site(&[("sec-fetch-site", site)]));
        }
        for site in ["same-site", "cross-site", "", "Same-Origin "] {
            assert!(is_cross_site(&[("sec-fetch-site", site)]), "{site}");
        }
        for origin in [
            "http://127.0.0.1:8080",
            "http://localhost:7602",
            "http://evil.example",
            "file://127.0.0.1:7602",
            "null",
        ] {
            assert!(is_cross_site(&[("origin", origin)]), "{origin}");
        }
    }
}
