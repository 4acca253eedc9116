//! HTTP listeners: the interface for other programs, settings, the key of clients, and errors.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hearthnet_http::{
    ApiKey, HttpError, HttpServer, HttpSettings, MIN_KEY_BYTES, Metrics, NamedKeys, Part,
    SocketSettings, Tls,
};
use hearthnet_hub::reference::expand_home;
use hearthnet_orchestrator::http::serve;
use hearthnet_orchestrator::service::Service;
use hearthnet_platform::{files, regular_file, whole_file};
use zeroize::Zeroizing;

use crate::cli::{Failure, Kind, failure, note};
use crate::config::Config;
use crate::home::{HttpKeys, close_folder};
use crate::page::{self, PageNode};

/// Time limit for responses after their chats have ended.
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);

/// Time limit for running chats when the service stops.
const DRAIN_DEADLINE: Duration = Duration::from_secs(20);

/// Installs the metrics. Call it before anything that should be counted.
pub(crate) fn count(part: Part) -> Result<Metrics, Failure> {
    Metrics::install(part).map_err(Failure::internal)
}

/// Opens the HTTP interface of a service, with the page and the named keys of a data directory;
/// `listen` overrides the configuration. `node` is the node of this process, if it runs one.
pub(crate) async fn open_http(
    service: &Service,
    node: Option<PageNode>,
    listen: Option<&str>,
    dir: &Path,
    config: &Config,
) -> Result<HttpServer, Failure> {
    let keys = dir.to_owned();
    let keys = NamedKeys::watch(HttpKeys::path(dir), move || {
        Ok(HttpKeys::read(&keys)?.named())
    });
    let settings = HttpSettings {
        named_keys: Some(keys.map_err(|why| Failure::new(Kind::Refused, why))?),
        socket: socket(config).map(|path| SocketSettings {
            path,
            mode: config.http.socket_mode,
        }),
        pages: &page::FILES,
        ..http_settings(listen.unwrap_or(&config.http.listen), config)?
    };
    let calls = page::calls(service.clone(), node, settings.api_key.is_some());
    let metrics = count(Part::Caller)?;
    let server = serve(service.clone(), Some(metrics), calls, &settings).await;
    server.map_err(|error| http_failure(&error, "--http"))
}

/// Result of opening a listener. If the port of the configuration is taken, continues without the
/// listener, which is for `what`. An address that was `named` must be free.
pub(crate) fn unless_taken(
    opened: Result<HttpServer, Failure>,
    named: bool,
    what: &str,
) -> Result<Option<HttpServer>, Failure> {
    match opened {
        Ok(server) => Ok(Some(server)),
        Err(failure) if !named && failure.kind == Kind::Host => {
            note(format!("no {what}: {}", failure.with_hint()));
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

/// Finishes running answers, then closes the listener. New requests are refused meanwhile.
pub(crate) async fn close(server: HttpServer, service: &Service) {
    service.drain(DRAIN_DEADLINE).await;
    server.shutdown(CLOSE_DEADLINE).await;
}

/// Settings of an HTTP listener at `listen`, with the configured key and certificate.
pub(crate) fn http_settings(listen: &str, config: &Config) -> Result<HttpSettings, Failure> {
    Ok(HttpSettings {
        listen: listen.to_owned(),
        tls: tls(config)?,
        api_key: match key_file(config) {
            None => None,
            Some(path) => Some(read_key(&path)?.0),
        },
        allowed_hosts: config.http.allowed_hosts.clone(),
        cors_origins: config.http.cors_origins.clone(),
        aliases: config.http.aliases.clone(),
        max_body_bytes: config.http.max_body_bytes.0,
        strict: config.http.strict,
        ..HttpSettings::default()
    })
}

/// Error of a listener; `flag` is the flag that sets its address.
pub(crate) fn http_failure(error: &HttpError, flag: &str) -> Failure {
    match error {
        HttpError::KeyNeeded(_) => Failure::new(Kind::Config, error.to_string()).hint(
            "name a file that holds a key with http.api_key_file, or listen on 127.0.0.1 only",
        ),
        HttpError::Listen { source, .. } => Failure::new(Kind::of_io(source), error.to_string())
            .hint(format!(
                "is another program using the port? {flag} 127.0.0.1:0 takes a free one"
            )),
        HttpError::Socket { source, .. } => {
            Failure::new(Kind::of_io(source), error.to_string()).hint(
                "name a path in a folder of its own with http.socket, for example /run/user/1000/hearthnet/http.socket; in the home directory itself the sandbox allows none",
            )
        }
        _ => Failure::new(Kind::Host, error.to_string()),
    }
}

/// Path that a setting names, if it names one.
fn path_of(setting: &str) -> Option<PathBuf> {
    let path = match setting {
        "" => return None,
        path => expand_home(Path::new(path)),
    };
    Some(std::path::absolute(&path).unwrap_or(path))
}

/// File with the key that clients must send, if the configuration names one.
pub(crate) fn key_file(config: &Config) -> Option<PathBuf> {
    path_of(&config.http.api_key_file)
}

/// Unix socket of the HTTP interface, if the configuration names one.
pub(crate) fn socket(config: &Config) -> Option<PathBuf> {
    path_of(&config.http.socket)
}

/// Files of the certificate chain and of its key, if the configuration names them.
pub(crate) fn tls_files(config: &Config) -> Option<[PathBuf; 2]> {
    let http = &config.http;
    Some([
        path_of(&http.tls_certificate_file)?,
        path_of(&http.tls_key_file)?,
    ])
}

/// Certificate of the HTTP interface, if the configuration names one. Warns of a key that other users
/// can read.
fn tls(config: &Config) -> Result<Option<Tls>, Failure> {
    let Some([certificate, key]) = tls_files(config) else {
        return Ok(None);
    };
    let tls = Tls::open(&certificate, &key).map_err(|error| {
        failure!(
            Config,
            "http.tls_certificate_file, http.tls_key_file: {error}"
        )
        .hint(error.hint())
    })?;
    let found = std::fs::metadata(&key).ok();
    if let Some(mode) = found.as_ref().and_then(files::open_to_others) {
        let key = key.display();
        note(format!(
            "warning: other users may use the TLS key {key} (mode {mode:03o}); `chmod 600 {key}` closes it"
        ));
    }
    Ok(Some(tls))
}

/// Reads the key that clients must send, from a file that only its owner can read: its digest, and
/// its text.
pub(crate) fn read_key(path: &Path) -> Result<(ApiKey, Zeroizing<String>), Failure> {
    let fail = |why: String| {
        failure!(Config, "http.api_key_file {}: {why}", path.display())
            .hint("for example: (umask 077; head -c 24 /dev/urandom | base64 > http.key)")
    };
    let folder = whole_file::folder_of(path);
    if let Some(mode) = files::writable_by_others(folder) {
        let why = format!("other users may write to its folder (mode {mode:03o})");
        return Err(fail(why).hint(close_folder(folder)));
    }
    let file = regular_file::open(path).map_err(|e| fail(e.to_string()))?;
    let metadata = file.metadata().map_err(|e| fail(e.to_string()))?;
    if files::open_to_others(&metadata).is_some() {
        return Err(fail("other users may read it: chmod 600".into()));
    }
    // A key is one line; a longer file is surely something else.
    let text = regular_file::all_of(file, 4096).map_err(|e| match e.kind() {
        ErrorKind::FileTooLarge => fail("it is too long for a key".into()),
        _ => fail(e.to_string()),
    })?;
    let text = Zeroizing::new(String::from_utf8_lossy(&text).trim().to_owned());
    let key = ApiKey::new(&text).ok_or_else(|| {
        fail(format!(
            "a key has at least {MIN_KEY_BYTES} printable ASCII characters"
        ))
    })?;
    Ok((key, text))
}
