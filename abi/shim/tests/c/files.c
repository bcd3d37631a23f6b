/* Files are as those of /sys: for reading, and nothing of their folder is made or missing. */
#include "check.h"

#include <sys/xattr.h>

static void for_reading(void)
{
    char again[64];
    int fd = open(DEVICE "/node_type", O_RDONLY);
    struct stat by_fd, by_path;
    FAILS(write(fd, "x", 1), EBADF);
    CHECK(reads(fd, "1: CA\n") && lseek(fd, 0, SEEK_SET) == 0 && reads(fd, "1: CA\n"));
    CHECK(fstat(fd, &by_fd) == 0 && by_fd.st_mode == (S_IFREG | 0444));
    CHECK(stat(DEVICE "/node_type", &by_path) == 0 && by_path.st_ino == by_fd.st_ino);
    CHECK(by_path.st_dev == by_fd.st_dev);
    /* Whichever way its descriptor is asked. */
    struct stat empty, link;
    struct statx x;
    snprintf(again, sizeof again, "/proc/self/fd/%d", fd);
    CHECK(fstatat(fd, "", &empty, AT_EMPTY_PATH) == 0 && empty.st_ino == by_path.st_ino);
    CHECK(empty.st_nlink == 1 && empty.st_dev == by_path.st_dev && empty.st_mtime == 0);
    CHECK(stat(again, &link) == 0 && link.st_ino == by_path.st_ino);
    CHECK(statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &x) == 0);
    CHECK(x.stx_ino == by_path.st_ino && x.stx_nlink == 1 && x.stx_mtime.tv_sec == 0);
    CHECK(x.stx_dev_major == 0 && x.stx_dev_minor == 0 && x.stx_size == 6);
    FAILS(getxattr(DEVICE "/node_type", "user.x", again, sizeof again), ENOTSUP);
    /* Not even by another way. */
    snprintf(again, sizeof again, "/proc/self/fd/%d", fd);
    int writable = open(again, O_RDWR);
    CHECK(writable < 0 || write(writable, "x", 1) == -1);
    close(writable);
    close(fd);
    fd = open(DEVICE "/node_type", O_PATH | O_CLOEXEC);
    CHECK(fd >= 0 && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    FAILS(read(fd, again, 1), EBADF);
    close(fd);

    FAILS(open(DEVICE "/node_type", O_RDONLY | O_CREAT | O_EXCL, 0600), EEXIST);
    FAILS(open(DEVICE, O_RDONLY | O_CREAT, 0600), EISDIR);
    FAILS(open(DEVICE "/node_type", O_RDWR), EACCES);
    CHECK(!fopen(DEVICE "/node_type", "w") && errno == EACCES);
}

static void slashes_at_the_end(void)
{
    struct stat info;
    char path[PATH_MAX];
    FAILS(open(DEVICE "/node_type/", O_RDONLY), ENOTDIR);
    FAILS(stat(DEVICE "/node_type/.", &info), ENOTDIR);
    FAILS(access("/dev/infiniband/quipu0/", R_OK), ENOTDIR);
    FAILS(readlink(DEVICE "/node_type/", path, sizeof path), ENOTDIR);
    CHECK(!realpath(DEVICE "/node_type/", path) && errno == ENOTDIR);
    CHECK(!opendir(DEVICE "/node_type/") && errno == ENOTDIR);
    CHECK(realpath("//sys/./class//infiniband/../infiniband/quipu0/", path));
    CHECK(strcmp(path, DEVICE) == 0);
}

/* Success leaves errno as it was. */
static void errors(void)
{
    struct stat info;
    errno = 77;
    CHECK(stat(DEVICES, &info) == 0 && errno == 77);
    CHECK(access("/dev/infiniband/uverbs0", F_OK) == 0 && errno == 77);
    int fd = open(DEVICE "/ports/1/gids/0", O_RDONLY);
    CHECK(fd >= 0 && errno == 77);
    close(fd);
    fd = open(DEVICES, O_RDONLY);
    CHECK(fd >= 0 && errno == 77);
    close(fd);
}

/* The network interface is the one of the address, and no other. */
static void interfaces(void)
{
    CHECK(access(DEVICE "/device/net/lo", F_OK) == 0);
    FAILS(access(DEVICE "/device/net/bogus", F_OK), ENOENT);
    FAILS(access(DEVICE "/device/net/l", F_OK), ENOENT);
    FAILS(access(DEVICE "/device/net/lo/mtu", F_OK), ENOENT);
    int fd = open(DEVICE "/device/net/lo", O_RDONLY | O_DIRECTORY);
    FAILS(openat(fd, "mtu", O_RDONLY), ENOENT);
    CHECK(faccessat(fd, "../lo", F_OK, 0) == 0);
    close(fd);
}

/* Of the devices those are there that are listed. */
static void devices(void)
{
    FAILS(access(DEVICES "/quipu_qp0", F_OK), ENOENT);
    FAILS(access("/dev/infiniband/quipu_qp0", F_OK), ENOENT);
    FAILS(open(DEVICES "/quipu_iw0/node_type", O_RDONLY), ENOENT);
    FAILS(open("/sys/class/infiniband_verbs/quipu_iw0/ibdev", O_RDONLY), ENOENT);
    FAILS(access(DEVICES "/quipu_iw0/device/net/lo", F_OK), ENOENT);
}

int main(void)
{
    errors();
    for_reading();
    slashes_at_the_end();
    interfaces();
    devices();
    return failures != 0;
}
