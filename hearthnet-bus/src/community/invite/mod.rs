//! Joining a community: the invite code for people, and the join request that is signed with it.
//!
//! An invite is a fresh Ed25519 key. The event log holds its public half, with the level, the
//! number of uses and the expiry that the inviter signed; the *code* holds the secret half. A node
//! with the code signs a [`JoinRequest`] that names the node. Every node of the community can
//! verify that signature from the log alone, for ever. The code therefore never crosses the
//! network, and an intercepted request is useless: it admits only the node that it names.
//!
//! # The code
//! `specs/invite.md` is the normative text. Bech32m (BIP-350) over the following bytes, with the prefix `hearth`. Upper or lower case, with
//! white space anywhere, because mail programs and chats break codes into lines.
//!
//! | bytes | field |
//! |---|---|
//! | 1 | version, 1 |
//! | 32 | community: the public key of its root |
//! | 32 | invite secret: the seed of the invite key |
//! | 5 | expiry, Unix seconds, big-endian |
//! | 0..8 hints | 4, IPv4 address, port; or 6, IPv6 address, port; big-endian |
//!
//! The checksum detects every error of up to three characters, and any other with a probability of
//! 1 - 2^-30. A hint is an address to try first. It proves nothing; the TLS handshake and the log's
//! signatures do. The expiry in the code lets the joiner's program report it at once; the expiry in
//! the log is the one that counts.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bech32::primitives::decode::CheckedHrpstring;
use bech32::{Bech32m, Hrp};
use hearthnet_text::{is_plain_in_text, sanitize_name};
use hearthnet_transport::Code;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use zeroize::{Zeroize as _, Zeroizing};

use crate::{CommunityId, Domain, NodeId, NodeKey, RandomnessError, SIGNATURE_BYTES};

/// Prefix of every code, before the separator `1`.
const PREFIX: Hrp = Hrp::parse_unchecked("hearth");
/// Version of the layout.
const VERSION: u8 = 1;
/// Number of bytes before the hints.
const FIXED_BYTES: usize = 1 + 32 + 32 + 5;
/// Maximum number of endpoint hints in a code. A machine has a handful of addresses, and a code
/// should stay short enough to be read aloud.
pub const MAX_HINTS: usize = 8;
/// Characters of the longest code (8 hints of 19 bytes), without white space.
pub(crate) const MAX_CODE_CHARS: usize = 7 + (FIXED_BYTES + MAX_HINTS * 19) * 8 / 5 + 1 + 6;
/// Maximum length of a parsed text in bytes: a code and the white space that mail programs add.
const MAX_TEXT_BYTES: usize = 4 * MAX_CODE_CHARS;
/// Maximum length of a node's display name in bytes; the event log's limit for names.
pub const MAX_NAME_BYTES: usize = 64;

/// Content of an invite code. `Debug` omits the secret.
///
/// ```
/// # use hearthnet_bus::{invite::Invite, CommunityId, NodeKey};
/// let community = CommunityId::from(NodeKey::from_secret(&[1; 32]).id());
/// let hints = vec!["192.168.1.20:7600".parse().unwrap()];
/// let invite = Invite::new(community, [7; 32], 1_800_000_000, hints).unwrap();
/// let code = invite.to_string();
/// assert!(code.starts_with("hearth1"));
/// assert_eq!(code.parse::<Invite>().unwrap(), invite);
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Invite {
    community: CommunityId,
    secret: Zeroizing<[u8; 32]>,
    expires: u64,
    hints: Vec<SocketAddr>,
}

/// Reason why a text is not an invite code, or a code cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InviteError {
    #[error("an invite code begins with \"hearth1\"; paste the whole code")]
    Prefix,
    #[error("this is longer than any invite code; paste the code alone")]
    TooLong,
    /// A character outside the alphabet of codes (which omits `1`, `b`, `i` and `o`).
    #[error("the invite code has the character {found:?}, which no code has; paste it again")]
    Character {
        /// First such character.
        found: char,
    },
    #[error("the invite code mixes capital and small letters; paste it as it was printed")]
    MixedCase,
    /// The checksum is wrong: characters were changed, lost or added.
    #[error("the invite code is mistyped or cut short: its checksum does not fit; paste it again")]
    Checksum,
    #[error("the invite code has version {found}, this program knows version 1; update it")]
    Version { found: u8 },
    /// The checksum is right, but the content is invalid.
    #[error("the invite code is invalid ({what}); ask for a new one")]
    Malformed { what: &'static str },
    /// More than [`MAX_HINTS`] hints (only when making a code).
    #[error("an invite code has room for {MAX_HINTS} addresses, not {found}")]
    Hints { found: usize },
    /// The operating system provided no randomness (only when making a code).
    #[error(transparent)]
    Randomness(#[from] RandomnessError),
}

impl InviteError {
    /// Stable code of the refusal.
    pub fn code(&self) -> Code {
        Code::new("bad_invite")
    }
}

impl Invite {
    /// Creates an invite to `community`. `secret` is the seed of the invite key, fresh and random.
    /// `expires` is in Unix seconds. `hints` are addresses of nodes of the community; an IPv6 scope
    /// is dropped, because it has no meaning on another machine.
    ///
    /// # Errors
    /// [`InviteError::Hints`] for more than [`MAX_HINTS`], [`InviteError::Malformed`] for an expiry
    /// of more than 40 bits.
    pub fn new(
        community: CommunityId,
        secret: [u8; 32],
        expires: u64,
        hints: Vec<SocketAddr>,
    ) -> Result<Self, InviteError> {
        if hints.len() > MAX_HINTS {
            return Err(InviteError::Hints { found: hints.len() });
        }
        if expires >> 40 != 0 {
            return Err(InviteError::Malformed {
                what: "its expiry has more than 40 bits",
            });
        }
        let hints = hints
            .into_iter()
            .map(|hint| SocketAddr::new(hint.ip(), hint.port()))
            .collect();
        Ok(Self {
            community,
            secret: Zeroizing::new(secret),
            expires,
            hints,
        })
    }

    /// [`Invite::new`] with a secret from the operating system.
    ///
    /// # Errors
    /// As [`Invite::new`], or [`InviteError::Randomness`].
    pub fn generate(
        community: CommunityId,
        expires: u64,
        hints: Vec<SocketAddr>,
    ) -> Result<Self, InviteError> {
        let key = NodeKey::generate()?;
        Self::new(community, *key.secret(), expires, hints)
    }

    /// Community to join. All data received from its nodes is checked against this key.
    pub fn community(&self) -> CommunityId {
        self.community
    }

    /// Invite key. Its public half is the invite's id in the event log.
    pub fn key(&self) -> NodeKey {
        NodeKey::from_secret(&self.secret)
    }

    /// Expiry in Unix seconds.
    pub fn expires(&self) -> u64 {
        self.expires
    }

    /// Addresses of nodes of the community when the code was made.
    pub fn hints(&self) -> &[SocketAddr] {
        &self.hints
    }

    /// Signs a request to admit `node` under the display name `name`.
    ///
    /// # Errors
    /// [`JoinError::Name`] for a name that fails [`is_name`].
    pub fn request(&self, node: NodeId, name: &str) -> Result<JoinRequest, JoinError> {
        JoinRequest::sign(&self.key(), self.community, node, name)
    }

    pub(crate) fn bytes(&self) -> Zeroizing<Vec<u8>> {
        let mut out = Vec::with_capacity(FIXED_BYTES + MAX_HINTS * 19);
        out.push(VERSION);
        out.extend_from_slice(self.community.as_bytes());
        out.extend_from_slice(self.secret.as_slice());
        out.extend(self.expires.to_be_bytes().into_iter().skip(3));
        for hint in &self.hints {
            match hint.ip() {
                IpAddr::V4(ip) => {
                    out.push(4);
                    out.extend_from_slice(&ip.octets());
                }
                IpAddr::V6(ip) => {
                    out.push(6);
                    out.extend_from_slice(&ip.octets());
                }
            }
            out.extend_from_slice(&hint.port().to_be_bytes());
        }
        Zeroizing::new(out)
    }

    pub(crate) fn from_content(content: &[u8]) -> Result<Self, InviteError> {
        let malformed = |what| InviteError::Malformed { what };
        let mut rest = Reader(content);
        match rest.array::<1>() {
            Some([VERSION]) => {}
            Some([found]) => return Err(InviteError::Version { found }),
            None => return Err(malformed("it is empty")),
        }
        let short = || malformed("it is too short");
        let root = rest.array::<32>().ok_or_else(short)?;
        let root =
            NodeId::from_bytes(&root).map_err(|_| malformed("its community key is not valid"))?;
        let secret = Zeroizing::new(rest.array::<32>().ok_or_else(short)?);
        let expires = rest
            .array::<5>()
            .ok_or_else(short)?
            .into_iter()
            .fold(0, |sum, byte| sum << 8 | u64::from(byte));
        let mut hints = Vec::new();
        while let Some([kind]) = rest.array::<1>() {
            let cut = || malformed("an address is cut off");
            let ip: IpAddr = match kind {
                4 => Ipv4Addr::from(rest.array::<4>().ok_or_else(cut)?).into(),
                6 => Ipv6Addr::from(rest.array::<16>().ok_or_else(cut)?).into(),
                _ => return Err(malformed("an address has an unknown type")),
            };
            let port = u16::from_be_bytes(rest.array().ok_or_else(cut)?);
            if hints.len() == MAX_HINTS {
                return Err(malformed("it has too many addresses"));
            }
            hints.push(SocketAddr::new(ip, port));
        }
        Self::new(CommunityId::from(root), *secret, expires, hints)
    }
}

/// Splits arrays of fixed length off a byte string.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }
}

/// The code. It holds the invite's secret: show it to the invited person only, and never log it.
impl fmt::Display for Invite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        bech32::encode_lower_to_fmt::<Bech32m, _>(f, PREFIX, &self.bytes()).map_err(|_| fmt::Error)
    }
}

impl fmt::Debug for Invite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invite")
            .field("community", &self.community)
            .field("expires", &self.expires)
            .field("hints", &self.hints)
            .finish_non_exhaustive()
    }
}

impl FromStr for Invite {
    type Err = InviteError;

    fn from_str(text: &str) -> Result<Self, InviteError> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(InviteError::TooLong);
        }
        let code: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let code = Zeroizing::new(code);
        if code.len() > MAX_CODE_CHARS {
            return Err(InviteError::TooLong);
        }
        let start = code.get(.."hearth1".len()).unwrap_or_default();
        if !start.eq_ignore_ascii_case("hearth1") {
            return Err(InviteError::Prefix);
        }
        let upper = code.bytes().any(|b| b.is_ascii_uppercase());
        if upper && code.bytes().any(|b| b.is_ascii_lowercase()) {
            return Err(InviteError::MixedCase);
        }
        // The last `1` is the separator, so a `1` in the data would be read as part of the prefix.
        let data = code.get("hearth1".len()..).unwrap_or_default();
        if let Some(found) = data
            .chars()
            .find(|c| !c.is_ascii_alphanumeric() || "1bioBIO".contains(*c))
        {
            return Err(InviteError::Character { found });
        }
        // Prefix and characters are valid, so the remaining cause is a changed, lost or added
        // character.
        let checked = CheckedHrpstring::new::<Bech32m>(&code).map_err(|_| InviteError::Checksum)?;
        let mut content: Vec<u8> = checked.byte_iter().collect();
        let invite = Self::from_content(&content);
        content.zeroize();
        let invite = invite?;
        // Accepts only the spelling that this program prints.
        if !Zeroizing::new(invite.to_string()).eq_ignore_ascii_case(&code) {
            return Err(InviteError::Malformed {
                what: "it has extra bits at its end",
            });
        }
        Ok(invite)
    }
}

/// Request to admit a node, signed with the key of an invite.
///
/// The signature is over [`Domain::JoinRequest`]'s prefix and the community's 32 bytes, the
/// node's 32 bytes, and the bytes of the name. Serialised, the signature is base64url.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinRequest {
    pub community: CommunityId,
    /// Node to admit. Must be the caller that sends the request.
    pub node: NodeId,
    /// Display name of the node: 1 to [`MAX_NAME_BYTES`] bytes, no control characters.
    pub name: String,
    /// Public key of the invite.
    pub invite: NodeId,
    pub proof: JoinProof,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct JoinProof(pub [u8; SIGNATURE_BYTES]);

/// Reason why a join request is refused before the log is asked about the invite.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The display name is empty, too long, or has forbidden characters.
    #[error("a node's name has 1 to {MAX_NAME_BYTES} bytes and no invisible characters")]
    Name,
    /// The signature is not that of the invite key over this request.
    #[error("the request to join was not signed with the invite that it names")]
    Signature,
}

impl JoinError {
    /// Stable code of the refusal.
    pub fn code(&self) -> Code {
        Code::new(match self {
            Self::Name => "bad_request",
            Self::Signature => "invalid_signature",
        })
    }
}

impl JoinRequest {
    /// Signs a request with an invite's key.
    ///
    /// # Errors
    /// [`JoinError::Name`].
    pub fn sign(
        invite: &NodeKey,
        community: CommunityId,
        node: NodeId,
        name: &str,
    ) -> Result<Self, JoinError> {
        if !is_name(name) {
            return Err(JoinError::Name);
        }
        let record = record(community, node, name);
        Ok(Self {
            community,
            node,
            name: name.to_owned(),
            invite: invite.id(),
            proof: JoinProof(invite.sign(Domain::JoinRequest, &record)),
        })
    }

    /// Checks the name and the signature. The log decides whether the invite exists, is valid and
    /// has uses left.
    ///
    /// # Errors
    /// Any [`JoinError`].
    pub fn verify(&self) -> Result<(), JoinError> {
        if !fits_log(&self.name) {
            return Err(JoinError::Name);
        }
        let record = record(self.community, self.node, &self.name);
        Domain::JoinRequest
            .verify(&self.invite, &record, &self.proof.0)
            .map_err(|_| JoinError::Signature)
    }
}

/// Bytes that the invite key signs. The two keys have fixed lengths, so the name ends with the
/// record.
fn record(community: CommunityId, node: NodeId, name: &str) -> Vec<u8> {
    [community.as_bytes(), node.as_bytes(), name.as_bytes()].concat()
}

/// Returns whether a node or a community may be given this name: 1 to [`MAX_NAME_BYTES`] bytes, at
/// least one visible character, and no character that is invisible or controls a terminal.
pub fn is_name(text: &str) -> bool {
    fits_log(text) && text.chars().all(is_plain_in_text) && !sanitize_name(text).is_empty()
}

/// Returns whether a log accepts this name. Visibility depends on the version of Unicode, so it
/// cannot decide whether an event is valid: all nodes must agree on that.
pub(crate) fn fits_log(text: &str) -> bool {
    !text.is_empty() && is_line(text, MAX_NAME_BYTES)
}

/// Returns whether `text` is one line of at most `max` bytes without control characters.
pub(crate) fn is_line(text: &str, max: usize) -> bool {
    text.len() <= max && !text.chars().any(char::is_control)
}

impl fmt::Debug for JoinProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl Serialize for JoinProof {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&URL_SAFE_NO_PAD.encode(self.0))
    }
}

impl<'de> Deserialize<'de> for JoinProof {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(de::Error::custom)?;
        let bytes = bytes
            .try_into()
            .map_err(|_| de::Error::custom("a signature has 64 bytes"))?;
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests;
