//! Restrictions of this process, which cannot be lifted. They bind the calling thread and the
//! threads that it starts.

use std::collections::BTreeMap;
use std::path::PathBuf;

use landlock::{
    ABI, Access as _, AccessFs, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, RulesetError,
    RulesetStatus, Scope, path_beneath_rules,
};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// Files and folders that a process needs.
#[derive(Default)]
pub struct Files {
    pub read: Vec<PathBuf>,
    /// Read and write access.
    pub write: Vec<PathBuf>,
    /// Read, write and ioctl access.
    pub devices: Vec<PathBuf>,
}

/// Keeps other processes of this user from reading this one's memory.
///
/// # Errors
/// The system's reason.
pub fn hide_memory() -> Result<(), String> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(|e| e.to_string())
}

/// Denies this process all files but these, with Landlock, and with them starting programs, signals
/// to other processes, and abstract sockets.
///
/// # Errors
/// The reason if the kernel restricts less than that.
pub fn restrict_files(files: &Files) -> Result<(), String> {
    // Newest ABI whose features are used here (Linux 6.12).
    let abi = ABI::V6;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let write = read
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeSock
        | AccessFs::MakeDir
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir
        | AccessFs::Refer;
    let restricted = || -> Result<RulesetStatus, RulesetError> {
        let control = read | AccessFs::WriteFile | AccessFs::IoctlDev;
        let ruleset = Ruleset::default()
            .handle_access(AccessFs::from_all(abi))?
            .scope(Scope::from_all(abi))?
            .create()?
            .add_rules(path_beneath_rules(&files.read, read))?
            .add_rules(path_beneath_rules(&files.write, write))?
            .add_rules(path_beneath_rules(&files.devices, control))?;
        Ok(ruleset.restrict_self()?.ruleset)
    };
    match restricted() {
        Ok(RulesetStatus::FullyEnforced) => Ok(()),
        Ok(RulesetStatus::PartiallyEnforced) => {
            Err("in part: the kernel is older than 6.12".into())
        }
        Ok(RulesetStatus::NotEnforced) => Err("the kernel has no Landlock".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// System calls that a daemon never makes, but an attacker might: inspect processes, start
/// programs, change mounts, load kernel code, or use rarely tested parts of the kernel. They fail
/// with EPERM instead of killing the process, because a library may try one and continue without
/// it.
const DENIED: [i64; 48] = [
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_reboot,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_sethostname,
    libc::SYS_syslog,
    libc::SYS_vhangup,
];

/// System calls that make machine code if all these bits are set in their third argument. A library
/// is mapped without `PROT_WRITE`.
const MACHINE_CODE: [(i64, i32); 4] = [
    (libc::SYS_mmap, libc::PROT_WRITE | libc::PROT_EXEC),
    (libc::SYS_mprotect, libc::PROT_EXEC),
    (libc::SYS_pkey_mprotect, libc::PROT_EXEC),
    (libc::SYS_shmat, libc::SHM_EXEC),
];

/// Socket families that a daemon may open; a name resolver may need the local ones.
pub const SOCKETS: [i32; 4] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
];

/// System calls that a process makes, of those that may be denied.
#[derive(Clone, Copy, Default)]
pub struct Calls {
    /// Sockets of these families.
    pub sockets: &'static [i32],
    /// Making machine code at run time: memory that can be written and executed, at once or in turn.
    pub machine_code: bool,
}

/// Denies system calls that only an attacker makes, and those that `calls` leaves out.
///
/// # Errors
/// The system's reason.
pub fn deny_system_calls(calls: Calls) -> Result<(), String> {
    let filter = || -> Result<BpfProgram, seccompiler::BackendError> {
        let other = calls.sockets.iter().map(|family| {
            let family = u64::from(family.unsigned_abs());
            SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, family)
        });
        let other = other.collect::<Result<Vec<_>, _>>()?;
        let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
            DENIED.map(|call| (call, Vec::new())).into();
        // A rule without a condition always matches.
        let other = match other.is_empty() {
            true => Vec::new(),
            false => vec![SeccompRule::new(other)?],
        };
        rules.insert(libc::SYS_socket, other);
        if !calls.machine_code {
            for (call, bits) in MACHINE_CODE {
                let bits = u64::from(bits.unsigned_abs());
                let all = SeccompCmpOp::MaskedEq(bits);
                let condition = SeccompCondition::new(2, SeccompCmpArgLen::Dword, all, bits)?;
                rules.insert(call, vec![SeccompRule::new(vec![condition])?]);
            }
        }
        let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        let arch = std::env::consts::ARCH.try_into()?;
        SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch)?.try_into()
    };
    let filter = filter().map_err(|e| e.to_string())?;
    seccompiler::apply_filter(&filter).map_err(|e| e.to_string())
}
