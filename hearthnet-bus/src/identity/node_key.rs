//! Secret key of a node.

use std::fmt;

use ed25519_dalek::SigningKey;
use hearthnet_transport::{Identity, IdentityError};
use zeroize::Zeroizing;

use crate::NodeId;

/// Ed25519 key pair of a node. Overwritten in memory when dropped; its `Debug` shows the public
/// half only. Stored on disk by [`NodeKey::load_or_create`].
pub struct NodeKey {
    pub(super) signing: SigningKey,
    id: NodeId,
}

/// The operating system gave no randomness, so no key could be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the operating system gave no randomness to make a key from: {0}")]
pub struct RandomnessError(
    #[source]
    #[from]
    getrandom::Error,
);

impl NodeKey {
    /// Makes a new key from the operating system's randomness.
    ///
    /// # Errors
    /// [`RandomnessError`] if the system provides none.
    pub fn generate() -> Result<Self, RandomnessError> {
        let mut secret = Zeroizing::new([0; 32]);
        getrandom::fill(secret.as_mut_slice()).map_err(RandomnessError)?;
        Ok(Self::from_secret(&secret))
    }

    /// Derives the key pair from a 32-byte secret (the seed of RFC 8032 section 5.1.5). Every value
    /// is a valid secret.
    pub fn from_secret(secret: &[u8; 32]) -> Self {
        let signing = SigningKey::from_bytes(secret);
        let id = NodeId::from_own_key(&signing.verifying_key());
        Self { signing, id }
    }

    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Copy of the secret, overwritten when dropped. TLS needs it to prove this node's identity.
    pub fn secret(&self) -> Zeroizing<[u8; 32]> {
        Zeroizing::new(self.signing.to_bytes())
    }

    /// TLS certificate of this node, for both directions.
    ///
    /// # Errors
    /// If the certificate cannot be made, which is a bug of the TLS libraries.
    pub fn identity(&self) -> Result<Identity, IdentityError> {
        Identity::from_secret(&self.secret())
    }
}

impl fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeKey")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::key;

    #[test]
    fn debug_shows_the_id_and_nothing_of_the_secret() {
        let key = NodeKey::generate().unwrap();
        let shown = format!("NodeKey {{ id: {}, .. }}", key.id());
        assert_eq!(format!("{key:?}"), shown);
    }

    #[test]
    fn the_certificate_carries_the_node_id() {
        let key = key(3);
        assert_eq!(key.identity().unwrap().key(), key.id());
    }

    #[test]
    fn two_generated_keys_differ() {
        let [one, other] = [(); 2].map(|()| NodeKey::generate().unwrap().id());
        assert_ne!(one, other);
    }
}
