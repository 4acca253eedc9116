//! Events without effect: their reasons and codes.

use hearthnet_transport::Code as ErrorCode;

use crate::NodeId;

/// Reason why an event has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoEffect {
    /// The author is not, or no longer, a member.
    #[error("{0} is not a member of this community")]
    NotMember(NodeId),
    /// The author was revoked, and the event is later than the last one that counts.
    #[error("{0} was revoked")]
    Revoked(NodeId),
    #[error("this takes {needed} rights")]
    Level {
        /// The required level, in the possessive ("an anchor's").
        needed: &'static str,
    },
    /// The subject of the event is not a member.
    #[error("{0} is not a member of this community")]
    NoSuchMember(NodeId),
    /// The admitted node is a member already.
    #[error("{0} is a member already")]
    AlreadyMember(NodeId),
    #[error("{0} has this level already")]
    SameLevel(NodeId),
    #[error("{0} has this name already")]
    SameName(NodeId),
    /// The last anchor cannot leave while there are other members.
    #[error(
        "{0} is the last anchor and cannot leave while there are other members; promote another first"
    )]
    LastAnchor(NodeId),
    /// The root key cannot be admitted, promoted or revoked, because it is not a member.
    #[error("the community's root key cannot be a member")]
    Root,
    #[error("there is no such invite")]
    NoSuchInvite,
    #[error("an invite with this key exists already")]
    InviteExists,
    /// The invite was withdrawn, or its author has lost the right to invite.
    #[error("the invite was withdrawn")]
    InviteWithdrawn,
    #[error("the invite has expired")]
    InviteExpired,
    /// The invite has no uses left.
    #[error("the invite was used already")]
    InviteUsed,
    /// The level of the admission differs from that of the invite.
    #[error("the invite is for another level")]
    InviteLevel,
    /// There are [`MAX_MEMBERS`](super::MAX_MEMBERS) members or
    /// [`MAX_INVITES`](super::MAX_INVITES) open invites.
    #[error("the community is full")]
    Full,
    /// The community has adopted [`MAX_MODELS`](super::MAX_MODELS) models.
    #[error("a community adopts at most 16 models at a time; drop one first")]
    TooManyModels,
    #[error("the community has not adopted this model")]
    ModelNotAdopted,
    /// There are as many disputes, of the community or of the author's group, or as many verdicts as
    /// allowed.
    #[error(
        "there are as many open disputes or verdicts as this log allows; an anchor decides disputes with `hearthnet audit check`"
    )]
    TooManyDisputes,
    #[error("{0} was convicted by a verdict before")]
    Convicted(NodeId),
    #[error("{0} has accused falsely before, and may not accuse again")]
    FalseAccuser(NodeId),
    #[error("there is no such dispute")]
    NoSuchDispute,
    /// The author is a party of the dispute.
    #[error("{0} is a party of this dispute; another anchor has to judge it")]
    OwnDispute(NodeId),
    /// The dispute or the verdict is there already, or nothing that could be withdrawn.
    #[error("this dispute or verdict changes nothing")]
    SameVerdict,
    /// Counters of what a member gave fall or stay, do not fit into their days, or are of a day that
    /// was counted before or has not come.
    #[error("the counters of what {0} gave do not continue its earlier ones")]
    GaveNothingNew(NodeId),
    /// The kind has no effect on the durable state.
    #[error("this kind of event does not change the community")]
    Nothing,
}

impl NoEffect {
    /// Stable code of the refusal.
    pub fn code(&self) -> ErrorCode {
        ErrorCode::new(match self {
            Self::NotMember(_) | Self::Level { .. } => "unauthorized",
            Self::Revoked(_) => "revoked",
            Self::NoSuchInvite
            | Self::InviteExists
            | Self::InviteWithdrawn
            | Self::InviteExpired
            | Self::InviteUsed
            | Self::InviteLevel => "bad_invite",
            Self::TooManyModels => "model_limit",
            Self::ModelNotAdopted => "model_not_adopted",
            Self::TooManyDisputes => "dispute_limit",
            Self::NoSuchDispute => "no_dispute",
            Self::OwnDispute(_) | Self::FalseAccuser(_) => "unauthorized",
            _ => "bad_request",
        })
    }
}
