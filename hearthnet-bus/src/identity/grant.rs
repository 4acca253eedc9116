//! Session tokens: compact signed grants.
//!
//! `specs/session-grant.md` is the normative text. In short: a token is a canonical
//! CBOR map followed by the issuer's Ed25519 signature over a domain prefix and the
//! map's exact bytes.

use hearthnet_transport::CloseCode;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteArray;

use crate::identity::cbor;
use crate::identity::replay::ReplayError;
use crate::{Capability, Domain, NodeId, NodeKey, ReplayCache, SIGNATURE_BYTES, now_ms};

/// Maximum token length in bytes. Tokens have about 300; the rest is room for longer names.
pub const MAX_GRANT_BYTES: usize = 512;

/// Maximum lifetime of a grant in seconds. It bounds the memory of a replay cache and the use of a
/// stolen token.
pub const MAX_GRANT_LIFETIME_SECS: u64 = 3600;

/// Upper bound of the clock skew (seconds) that a check tolerates.
pub const MAX_CLOCK_SKEW_SECS: u64 = 300;

/// Bytes of an id that name a host's weights. The other 12 are random.
const NAME_BYTES: usize = 4;

/// Value of the body's field `v`.
const VERSION: u8 = 1;

/// Signed grant: `issuer` allows `subject` to use `scope` on `audience` for a limited time.
///
/// ```
/// # use hearthnet_bus::{Capability, Expectation, Grant, NodeKey, ReplayCache};
/// let (caller, host) = (NodeKey::from_secret(&[1; 32]), NodeKey::from_secret(&[2; 32]));
/// let grant = Grant {
///     issuer: caller.id(), // here the caller issues its own grant
///     subject: caller.id(),
///     audience: host.id(),
///     scope: Capability::shard_serve(),
///     not_before: 1_700_000_000,
///     expires: 1_700_000_060,
///     id: [9; 16], // random, never used twice
/// };
/// let token = grant.sign(&caller)?;
/// let expected = Expectation {
///     peer: caller.id(),
///     party: caller.id(),
///     audience: host.id(),
///     scope: &Capability::shard_serve(),
/// };
/// let mut seen = ReplayCache::new(1024);
/// let now = 1_700_000_001;
/// assert_eq!(Grant::admit(&token, &expected, |_| true, &mut seen, now, 30)?, grant);
/// # Ok::<(), hearthnet_bus::GrantError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Node that grants the right and signs the token.
    pub issuer: NodeId,
    /// Node that may present the token: the key of its TLS connection must be this one.
    pub subject: NodeId,
    /// Node at which the token may be used.
    pub audience: NodeId,
    pub scope: Capability,
    /// First second (Unix time) in which the grant is valid.
    pub not_before: u64,
    /// First second in which the grant is no longer valid; at most [`MAX_GRANT_LIFETIME_SECS`]
    /// after `not_before`.
    pub expires: u64,
    /// Id: random, or the end of it as in [`Grant::of_host`]. A token opens one session only.
    pub id: [u8; 16],
}

/// Conditions that a token must meet for its bearer to be admitted.
#[derive(Debug, Clone)]
pub struct Expectation<'a> {
    /// Key that the TLS handshake proved.
    pub peer: NodeId,
    /// Node that the peer's quotas are charged to: the peer itself, or the member that answers for
    /// it in the community.
    pub party: NodeId,
    /// The node that runs the check.
    pub audience: NodeId,
    /// Capability that the peer asks for.
    pub scope: &'a Capability,
}

/// Reason why a token is refused. [`GrantError::code`] is the stable name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrantError {
    /// Longer than [`MAX_GRANT_BYTES`] or too short to carry a signature.
    #[error("the session token has {found} bytes, which is not a valid length")]
    Length {
        /// Bytes received.
        found: usize,
    },
    /// The bytes are not the canonical CBOR map of a grant, or a field holds an impossible value.
    #[error("the session token cannot be read: {what}")]
    Malformed { what: &'static str },
    /// The signature was not made by the issuer over these bytes.
    #[error("the session token's signature is not valid")]
    Signature,
    /// Signing only: the key is not the issuer's.
    #[error("a grant can only be signed by the issuer that it names")]
    NotIssuer,
    /// The token was issued to another node than the TLS peer.
    #[error("the session token was issued to {subject}, not to the node that presents it")]
    Subject {
        /// Node that may present the token.
        subject: NodeId,
    },
    #[error("the session token is for use at {audience}, not at this node")]
    Audience {
        /// Node at which the token may be used.
        audience: NodeId,
    },
    /// A session was opened with this token before.
    #[error("the session token was used before; make a new one for each session")]
    Replayed,
    #[error(
        "the session token expired at Unix time {expires}, {late} s ago; compare the clocks of \
         the two machines"
    )]
    Expired {
        /// End of validity, in Unix seconds.
        expires: u64,
        /// Seconds since the end, by this node's clock.
        late: u64,
    },
    #[error(
        "the session token is valid only from Unix time {not_before}, in {early} s; compare the \
         clocks of the two machines"
    )]
    NotYet {
        /// Start of validity, in Unix seconds.
        not_before: u64,
        /// Seconds until the start, by this node's clock.
        early: u64,
    },
    /// The token grants another capability than the requested one.
    #[error("the session token allows {granted}, not the requested capability")]
    Scope { granted: Capability },
    /// This node does not accept grants of the issuer.
    #[error("the session token was issued by {issuer}, which may not grant rights at this node")]
    Issuer { issuer: NodeId },
    /// The replay cache is full. A token that cannot be recorded is refused.
    #[error("too many session tokens were used in the last hour; try again later")]
    CacheFull,
}

fn malformed(what: &'static str) -> GrantError {
    GrantError::Malformed { what }
}

impl GrantError {
    /// Stable code of the refusal, as peers, metrics and logs spell it.
    pub fn code(&self) -> CloseCode {
        match self {
            Self::Length { .. } | Self::Malformed { .. } => CloseCode::TokenInvalid,
            Self::Signature => CloseCode::InvalidSignature,
            Self::Subject { .. } => CloseCode::TokenSubject,
            Self::Audience { .. } => CloseCode::TokenAudience,
            Self::Scope { .. } => CloseCode::TokenScope,
            Self::Expired { .. } | Self::NotYet { .. } => CloseCode::TokenExpired,
            Self::NotIssuer | Self::Issuer { .. } => CloseCode::Unauthorized,
            Self::Replayed => CloseCode::TokenReplayed,
            Self::CacheFull => CloseCode::SessionLimit,
        }
    }
}

impl Grant {
    /// Grant of one session with the layers of `audience`, valid for `seconds` from now on.
    ///
    /// # Errors
    /// If the system gives no randomness for its id.
    pub fn of_session(
        issuer: NodeId,
        subject: NodeId,
        audience: NodeId,
        seconds: u64,
    ) -> Result<Self, getrandom::Error> {
        let mut id = [0; 16];
        getrandom::fill(&mut id)?;
        let now = now_ms() / 1000;
        Ok(Self {
            issuer,
            subject,
            audience,
            scope: Capability::shard_serve(),
            not_before: now,
            expires: now + seconds,
            id,
        })
    }

    /// [`Grant::of_session`] for the host of `weights`. The last bytes of the id are the first of
    /// `weights`: a node with hosts of several models reads from its own grants for which host a
    /// session is.
    ///
    /// # Errors
    /// If the system gives no randomness for its id.
    pub fn of_host(
        issuer: NodeId,
        subject: NodeId,
        audience: NodeId,
        weights: &[u8; 32],
        seconds: u64,
    ) -> Result<Self, getrandom::Error> {
        let mut grant = Self::of_session(issuer, subject, audience, seconds)?;
        let end = grant.id.last_chunk_mut::<NAME_BYTES>();
        if let (Some(end), Some(name)) = (end, weights.first_chunk::<NAME_BYTES>()) {
            *end = *name;
        }
        Ok(grant)
    }

    /// Whether the id is that of a grant for the host of `weights`.
    pub(crate) fn is_for_host(id: &[u8; 16], weights: &[u8; 32]) -> bool {
        id.last_chunk::<NAME_BYTES>() == weights.first_chunk::<NAME_BYTES>()
    }

    /// Encodes and signs the grant.
    ///
    /// # Errors
    /// [`GrantError::NotIssuer`] if `key` is not the issuer's;
    /// [`GrantError::Malformed`] if the lifetime is zero, negative or too long.
    pub fn sign(&self, key: &NodeKey) -> Result<Vec<u8>, GrantError> {
        if key.id() != self.issuer {
            return Err(GrantError::NotIssuer);
        }
        self.check_lifetime()?;
        let mut token = Body::of(self).encode()?;
        let signature = key.sign(Domain::SessionGrant, &token);
        token.extend_from_slice(&signature);
        match token.len() {
            found if found > MAX_GRANT_BYTES => Err(GrantError::Length { found }),
            _ => Ok(token),
        }
    }

    /// Verifies `token` and records it as used.
    ///
    /// The checks are: form and signature, subject, audience, scope, time, issuer (by `may_issue`)
    /// and replay. The token is recorded in `seen` only if all other checks pass, so refused tokens
    /// cannot fill the cache. `now` is in Unix seconds. `skew` is the tolerated difference of the
    /// clocks in seconds, at most [`MAX_CLOCK_SKEW_SECS`].
    ///
    /// # Errors
    /// Any [`GrantError`] but `NotIssuer`.
    pub fn admit(
        token: &[u8],
        expected: &Expectation<'_>,
        may_issue: impl FnOnce(&NodeId) -> bool,
        seen: &mut ReplayCache,
        now: u64,
        skew: u64,
    ) -> Result<Self, GrantError> {
        let grant = Self::verify_signature(token)?;
        let Self {
            subject,
            audience,
            issuer,
            ..
        } = grant;
        if subject != expected.peer {
            return Err(GrantError::Subject { subject });
        }
        if audience != expected.audience {
            return Err(GrantError::Audience { audience });
        }
        if !grant.scope.satisfies(expected.scope) {
            return Err(GrantError::Scope {
                granted: grant.scope,
            });
        }
        grant.check_time(now, skew)?;
        if !may_issue(&issuer) {
            return Err(GrantError::Issuer { issuer });
        }
        seen.remember(&grant, expected.party, now, skew)?;
        Ok(grant)
    }

    /// First second in which a check with this skew refuses the grant as expired.
    pub(crate) fn expires_at(&self, skew: u64) -> u64 {
        self.expires.saturating_add(skew.min(MAX_CLOCK_SKEW_SECS))
    }

    pub(crate) fn verify_signature(token: &[u8]) -> Result<Self, GrantError> {
        let found = token.len();
        if found > MAX_GRANT_BYTES {
            return Err(GrantError::Length { found });
        }
        let (body, signature) = token
            .split_last_chunk::<SIGNATURE_BYTES>()
            .ok_or(GrantError::Length { found })?;
        let grant = Body::read(body)?;
        let verified = Domain::SessionGrant.verify(&grant.issuer, body, signature);
        verified.map_err(|_| GrantError::Signature)?;
        grant.check_lifetime()?;
        Ok(grant)
    }

    fn check_lifetime(&self) -> Result<(), GrantError> {
        match self.expires.checked_sub(self.not_before) {
            Some(1..=MAX_GRANT_LIFETIME_SECS) => Ok(()),
            _ => Err(malformed("its lifetime is not 1 to 3600 seconds")),
        }
    }

    fn check_time(&self, now: u64, skew: u64) -> Result<(), GrantError> {
        let skew = skew.min(MAX_CLOCK_SKEW_SECS);
        if now.saturating_add(skew) < self.not_before {
            let early = self.not_before.saturating_sub(now);
            return Err(GrantError::NotYet {
                not_before: self.not_before,
                early,
            });
        }
        if now >= self.expires_at(skew) {
            let late = now.saturating_sub(self.expires);
            return Err(GrantError::Expired {
                expires: self.expires,
                late,
            });
        }
        Ok(())
    }
}

impl ReplayCache {
    /// Records a grant whose form, signature and time were checked, in a place of `holder`. Drops
    /// tokens that have expired by `now` (Unix seconds). The grant is remembered for as long as
    /// [`Grant::admit`] with this `skew` would accept it.
    ///
    /// # Errors
    /// [`GrantError::Replayed`] if the grant was recorded before, [`GrantError::CacheFull`] if
    /// there is no room for it.
    pub fn remember(
        &mut self,
        grant: &Grant,
        holder: NodeId,
        now: u64,
        skew: u64,
    ) -> Result<(), GrantError> {
        let token = (grant.issuer, grant.id);
        self.note(token, holder, grant.expires_at(skew), now)
            .map_err(|refusal| match refusal {
                ReplayError::Seen => GrantError::Replayed,
                ReplayError::Full => GrantError::CacheFull,
            })
    }
}

/// Signed map. The fields stand in the order of their encoded keys (RFC 8949 section 4.2.1), so the
/// encoding of a body is canonical.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    v: u8,
    id: ByteArray<16>,
    aud: ByteArray<32>,
    exp: u64,
    iss: ByteArray<32>,
    nbf: u64,
    sub: ByteArray<32>,
    scope: String,
}

impl Body {
    fn of(grant: &Grant) -> Self {
        Self {
            v: VERSION,
            id: ByteArray::new(grant.id),
            aud: ByteArray::new(*grant.audience.as_bytes()),
            exp: grant.expires,
            iss: ByteArray::new(*grant.issuer.as_bytes()),
            nbf: grant.not_before,
            sub: ByteArray::new(*grant.subject.as_bytes()),
            scope: grant.scope.to_string(),
        }
    }

    fn encode(&self) -> Result<Vec<u8>, GrantError> {
        cbor::encode(self).map_err(|_| malformed("it cannot be encoded"))
    }

    fn read(bytes: &[u8]) -> Result<Grant, GrantError> {
        // The map is flat; a recursion limit of 2 is one more than it needs.
        let it: Self = cbor::decode(bytes, 2)
            .map_err(|_| malformed("it is not the canonical map of a grant"))?;
        if it.v != VERSION {
            return Err(malformed("its version is unknown"));
        }
        let node = |key: ByteArray<32>, what| NodeId::from_bytes(&key).map_err(|_| malformed(what));
        Ok(Grant {
            issuer: node(it.iss, "its issuer is not a usable key")?,
            subject: node(it.sub, "its subject is not a usable key")?,
            audience: node(it.aud, "its audience is not a usable key")?,
            scope: it
                .scope
                .parse()
                .map_err(|_| malformed("its scope is not a capability"))?,
            not_before: it.nbf,
            expires: it.exp,
            id: *it.id,
        })
    }
}

#[cfg(test)]
#[path = "grant_tests.rs"]
mod tests;
