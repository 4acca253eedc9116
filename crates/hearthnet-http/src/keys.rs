//! Keys that clients present: the owner's, and named ones, each with limits of its own and counts of
//! its use since the start of the process.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::watched::Watched;

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

/// Shortest accepted key: 16 random characters have 80 bits or more.
pub const MIN_KEY_BYTES: usize = 16;

/// Secret that clients must send.
#[derive(Clone)]
pub struct ApiKey([u8; 32]);

impl ApiKey {
    /// A key from its text, without surrounding white space. `None` if it is shorter than
    /// [`MIN_KEY_BYTES`] or has characters that a header cannot carry.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        let fits = text.len() >= MIN_KEY_BYTES && text.bytes().all(|b| b.is_ascii_graphic());
        fits.then(|| Self(Sha256::digest(text).into()))
    }

    /// A key from its [`digest`](Self::digest).
    pub fn from_digest(digest: [u8; 32]) -> Self {
        Self(digest)
    }

    /// SHA-256 of the key.
    pub fn digest(&self) -> [u8; 32] {
        self.0
    }

    /// Digest of what a client presents as its key.
    pub(crate) fn presented(guess: &[u8]) -> Self {
        Self(Sha256::digest(guess).into())
    }

    /// Constant-time comparison: compares all bytes of the digests.
    pub(crate) fn is(&self, presented: &Self) -> bool {
        self.0.ct_eq(&presented.0).into()
    }
}

/// Omits the secret.
impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey")
    }
}

/// Key of a program or a person, beside that of the owner.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs)] // An entry of the file of keys.
pub struct NamedKey {
    pub name: String,
    pub key: ApiKey,
    pub limits: KeyLimits,
}

/// Limits of a key; `None` is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // An entry of the file of keys.
pub struct KeyLimits {
    /// Requests at a time, those that wait included.
    pub requests: Option<u32>,
    /// Tokens of prompts and answers.
    pub tokens_per_minute: Option<u64>,
    pub tokens_per_day: Option<u64>,
}

/// Named keys of a listener, and their use. Clones share them.
#[derive(Clone)]
pub struct NamedKeys(Arc<Inner>);

struct Inner {
    listed: Watched<Vec<NamedKey>, String>,
    /// Use of each key that was presented, by the key's name.
    uses: Mutex<BTreeMap<String, Arc<Mutex<Use>>>>,
}

/// Use of a key.
#[derive(Debug, Default)]
struct Use {
    running: u32,
    requests: u64,
    tokens: u64,
    refused: u64,
    minute: Spent,
    day: Spent,
}

/// Use of a key since the start of the process. `node.status` reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::exhaustive_structs)] // The program also reports keys that no process has used.
pub struct KeyUse {
    pub name: String,
    #[serde(default)]
    pub limits: KeyLimits,
    /// Requests in progress.
    pub running: u32,
    /// Requests that were admitted.
    pub requests: u64,
    /// Tokens of prompts and answers.
    pub tokens: u64,
    /// Requests that were refused because of the key's limits.
    pub refused: u64,
}

impl NamedKeys {
    /// Keys of a file, which `read` reads. It is read again when it has changed.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn watch(
        file: PathBuf,
        read: impl Fn() -> Result<Vec<NamedKey>, String> + Send + Sync + 'static,
    ) -> Result<Self, String> {
        Ok(Self(Arc::new(Inner {
            listed: Watched::new(vec![file], Box::new(read))?,
            uses: Mutex::default(),
        })))
    }

    fn listed(&self) -> Arc<Vec<NamedKey>> {
        self.0.listed.get(|error| {
            tracing::warn!("the earlier named keys remain in force: {error}");
        })
    }

    /// The named key that a client presents.
    pub(crate) fn find(&self, presented: &ApiKey) -> Option<PresentedKey> {
        let listed = self.listed();
        let mut found = None;
        // All are compared, so that the time does not tell which one it is.
        for named in listed.iter() {
            if named.key.is(presented) {
                found = Some(named);
            }
        }
        let named = found?;
        let mut uses = self.0.uses.lock();
        let used = Arc::clone(uses.entry(named.name.clone()).or_default());
        Some(PresentedKey {
            name: named.name.clone(),
            limits: named.limits,
            used,
        })
    }

    /// Use of each key that is listed, by name.
    pub fn uses(&self) -> Vec<KeyUse> {
        let (listed, uses) = (self.listed(), self.0.uses.lock());
        let used = listed.iter().map(|named| {
            let none = Arc::default();
            let used = uses.get(&named.name).unwrap_or(&none).lock();
            KeyUse {
                name: named.name.clone(),
                limits: named.limits,
                running: used.running,
                requests: used.requests,
                tokens: used.tokens,
                refused: used.refused,
            }
        });
        used.collect()
    }
}

/// Shows no key, not even its digest.
impl std::fmt::Debug for NamedKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NamedKeys")
    }
}

/// Named key of a request.
#[derive(Debug, Clone)]
pub struct PresentedKey {
    name: String,
    limits: KeyLimits,
    used: Arc<Mutex<Use>>,
}

/// Limit of a key that a request exceeds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OverLimit {
    /// Too many requests at a time.
    #[error("the key {name:?} may have {most} requests at a time; wait until one has ended")]
    Requests { name: String, most: u32 },
    /// Too many tokens.
    #[error("the key {name:?} has used its {most} tokens per {period}; ask again in {} s", after.as_secs())]
    Tokens {
        name: String,
        most: u64,
        period: &'static str,
        /// Time until the key has tokens again, in whole seconds.
        after: Duration,
    },
}

impl PresentedKey {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Begins a request.
    ///
    /// # Errors
    /// [`OverLimit`].
    pub fn begin(&self) -> Result<KeyRequest, OverLimit> {
        self.begin_at(Instant::now())
    }

    fn begin_at(&self, now: Instant) -> Result<KeyRequest, OverLimit> {
        let mut used = self.used.lock();
        if let Err(over) = self.check(&mut used, now) {
            used.refused += 1;
            return Err(over);
        }
        used.running += 1;
        used.requests += 1;
        drop(used);
        Ok(KeyRequest(self.clone()))
    }

    fn check(&self, used: &mut Use, now: Instant) -> Result<(), OverLimit> {
        if let Some(most) = self.limits.requests
            && used.running >= most
        {
            let name = self.name.clone();
            return Err(OverLimit::Requests { name, most });
        }
        for (limit, spent, period, name) in [
            (
                self.limits.tokens_per_minute,
                &mut used.minute,
                MINUTE,
                "minute",
            ),
            (self.limits.tokens_per_day, &mut used.day, DAY, "day"),
        ] {
            if let Some(most) = limit
                && let Some(wait) = spent.wait(most, period, now)
            {
                return Err(OverLimit::Tokens {
                    name: self.name.clone(),
                    most,
                    period: name,
                    after: Duration::from_secs(wait.as_secs() + 1),
                });
            }
        }
        Ok(())
    }

    /// Counts tokens of a prompt or an answer.
    pub fn spend(&self, tokens: u64) {
        self.spend_at(tokens, Instant::now());
    }

    fn spend_at(&self, tokens: u64, now: Instant) {
        let mut used = self.used.lock();
        used.tokens += tokens;
        let Use { minute, day, .. } = &mut *used;
        let limits = [
            (self.limits.tokens_per_minute, minute, MINUTE),
            (self.limits.tokens_per_day, day, DAY),
        ];
        for (limit, spent, period) in limits {
            if let Some(most) = limit {
                spent.add(tokens, most, period, now);
            }
        }
    }
}

/// Request in progress with a named key, until it is dropped.
#[derive(Debug)]
pub struct KeyRequest(PresentedKey);

impl Drop for KeyRequest {
    fn drop(&mut self) {
        let mut used = self.0.used.lock();
        used.running = used.running.saturating_sub(1);
    }
}

/// Tokens that count against a limit. They are forgotten evenly: a whole limit in one period.
#[derive(Debug, Default)]
struct Spent {
    tokens: f64,
    at: Option<Instant>,
}

impl Spent {
    fn forget(&mut self, most: u64, period: Duration, now: Instant) {
        let since = self.at.map_or(Duration::ZERO, |at| now - at);
        let forgotten = most as f64 * (since.as_secs_f64() / period.as_secs_f64());
        self.tokens = (self.tokens - forgotten).max(0.0);
        self.at = Some(now);
    }

    fn add(&mut self, tokens: u64, most: u64, period: Duration, now: Instant) {
        self.forget(most, period, now);
        self.tokens += tokens as f64;
    }

    /// Time until fewer tokens count than the limit; `None` if that is so now.
    fn wait(&mut self, most: u64, period: Duration, now: Instant) -> Option<Duration> {
        self.forget(most, period, now);
        let over = self.tokens - most as f64;
        (over >= 0.0).then(|| period.mul_f64((over / most.max(1) as f64).min(1e6)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(limits: KeyLimits) -> NamedKeys {
        let named = |name: &str, key: &str| NamedKey {
            name: name.to_owned(),
            key: ApiKey::new(key).unwrap(),
            limits,
        };
        let all = vec![
            named("kitchen", "kitchen-kitchen-kitchen"),
            named("desk", "desk-desk-desk-desk"),
        ];
        NamedKeys::watch(PathBuf::from("/nowhere"), move || Ok(all.clone())).unwrap()
    }

    fn find(keys: &NamedKeys, text: &str) -> Option<PresentedKey> {
        keys.find(&ApiKey::presented(text.as_bytes()))
    }

    #[test]
    fn a_key_is_found_by_its_text_and_counts_by_itself() {
        let keys = keys(KeyLimits {
            requests: Some(2),
            ..KeyLimits::default()
        });
        assert!(find(&keys, "kitchen").is_none());
        let kitchen = find(&keys, "kitchen-kitchen-kitchen").unwrap();
        assert_eq!(kitchen.name(), "kitchen");
        let running = [kitchen.begin().unwrap(), kitchen.begin().unwrap()];
        let over = kitchen.begin().unwrap_err();
        assert!(
            matches!(over, OverLimit::Requests { most: 2, .. }),
            "{over}"
        );
        assert!(find(&keys, "desk-desk-desk-desk").unwrap().begin().is_ok());
        drop(running);
        kitchen.spend(7);
        // The key of another request has the same counts.
        let kitchen = find(&keys, "kitchen-kitchen-kitchen").unwrap();
        let _running = kitchen.begin().unwrap();
        let uses = keys.uses();
        assert_eq!(
            uses[0],
            KeyUse {
                name: "kitchen".to_owned(),
                limits: kitchen.limits,
                running: 1,
                requests: 3,
                tokens: 7,
                refused: 1,
            }
        );
        assert_eq!((uses[1].requests, uses[1].refused), (1, 0));
        assert!(!format!("{keys:?} {kitchen:?}").contains("kitchen-"));
    }

    #[test]
    fn used_tokens_refuse_requests_until_they_are_forgotten() {
        let keys = keys(KeyLimits {
            tokens_per_minute: Some(60),
            tokens_per_day: Some(600),
            ..KeyLimits::default()
        });
        let key = find(&keys, "desk-desk-desk-desk").unwrap();
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let after = |seconds: u64| match key.begin_at(at(seconds)) {
            Ok(_) => None,
            Err(OverLimit::Tokens { period, after, .. }) => Some((period, after.as_secs())),
            Err(other) => panic!("{other}"),
        };
        key.spend_at(59, at(0));
        assert_eq!(after(0), None);
        // A request that began within the limit may exceed it.
        key.spend_at(31, at(0));
        assert_eq!(after(0), Some(("minute", 31)));
        assert_eq!(after(29), Some(("minute", 2)));
        assert_eq!(after(31), None);
        // Ten times the limit of a minute, over time, is the limit of a day.
        for minute in 1..11 {
            key.spend_at(60, at(31 + minute * 60));
        }
        let (period, wait) = after(31 + 11 * 60).unwrap();
        assert_eq!(period, "day");
        // 690 tokens, less some 4 that were forgotten: 86 over the limit, at 600 a day.
        assert!((11_000..14_000).contains(&wait), "{wait}");
        assert_eq!(after(31 + 11 * 60 + wait), None);
    }
}
