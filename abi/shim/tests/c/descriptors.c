/* Folders by their descriptors, as std::filesystem, fts and Python use them. */
#include "check.h"

#include <sys/wait.h>

/* A folder is opened, asked, listed and gone down from by its descriptor. */
static void folders(void)
{
    int found, fd = openat(AT_FDCWD, DEVICE, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    struct stat by_path, by_fd, below;
    CHECK(fd >= 0 && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    CHECK(fstat(fd, &by_fd) == 0 && S_ISDIR(by_fd.st_mode));
    CHECK(stat("/sys/class//infiniband/./quipu0/", &by_path) == 0);
    CHECK(by_path.st_ino == by_fd.st_ino && by_path.st_dev == by_fd.st_dev);
    CHECK(fstatat(fd, "", &by_path, AT_EMPTY_PATH) == 0 && by_path.st_ino == by_fd.st_ino);
    FAILS(fstatat(fd, "", &by_path, 0), ENOENT);
    struct statx more;
    CHECK(statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &more) == 0 && S_ISDIR(more.stx_mode));

    CHECK(fstatat(fd, "node_type", &below, 0) == 0 && S_ISREG(below.st_mode));
    CHECK(faccessat(fd, "ports/1", X_OK, 0) == 0);
    FAILS(faccessat(fd, "ports/2", F_OK, 0), ENOENT);
    FAILS(faccessat(fd, "node_type", W_OK, 0), EACCES);
    FAILS(readlinkat(fd, "ports", (char[9]){0}, 9), EINVAL);
    int file = openat(fd, "./node_type", O_RDONLY);
    CHECK(reads(file, "1: CA\n"));
    close(file);

    /* A copy, also in another process, is of the same folder. */
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3), state;
    pid_t child = fork();
    if (child == 0)
        _exit(faccessat(copy, "node_guid", R_OK, 0) ? 1 : 0);
    CHECK(waitpid(child, &state, 0) == child && state == 0);
    DIR *list = fdopendir(copy);
    CHECK(list && dirfd(list) == copy);
    CHECK(entries(list, "node_guid", &found) == 10 && found);
    rewinddir(list);
    CHECK(entries(list, "ports", &found) == 10 && found);
    CHECK(closedir(list) == 0);
    FAILS(fcntl(copy, F_GETFD), EBADF);

    int ports = openat(fd, "ports", O_RDONLY | O_DIRECTORY);
    CHECK(openat(ports, ".", O_RDONLY) >= 0);
    file = openat(ports, "../hca_type", O_RDONLY);
    CHECK(reads(file, "Quipu\n"));
    CHECK(read(ports, (char[1]){0}, 1) == -1);
    struct dirent **sorted = NULL;
    CHECK(scandirat(ports, "1", &sorted, NULL, alphasort) == 12);
    CHECK(sorted && strcmp(sorted[0]->d_name, "cap_mask") == 0);
}

/* What does not lie below a folder of ours is the kernel's. */
static void others(void)
{
    struct stat there, null;
    int fd = open("/dev/infiniband", O_RDONLY | O_DIRECTORY);
    CHECK(stat("/dev/null", &null) == 0);
    CHECK(fstatat(fd, "../null", &there, 0) == 0 && there.st_rdev == null.st_rdev);
    FAILS(fstatat(fd, "none", &there, 0), ENOENT);
    FAILS(openat(fd, "quipu0/x", O_RDONLY), ENOENT);
    FAILS(openat(fd, "quipu0", O_RDONLY | O_DIRECTORY), ENOTDIR);
    /* The number serves something else now. */
    close(fd);
    int again = open("/usr", O_RDONLY | O_DIRECTORY);
    CHECK(again == fd && fstatat(again, "../dev/null", &there, 0) == 0);
    FAILS(fstatat(again, "quipu0", &there, 0), ENOENT);
    int found;
    DIR *list = fdopendir(again);
    CHECK(entries(list, "bin", &found) > 1 && found);
    closedir(list);
    FAILS(fstat(again, &there), EBADF);
    CHECK(!fdopendir(again) && errno == EBADF);
    int plain = open("/proc/version", O_RDONLY);
    CHECK(!fdopendir(plain) && errno == ENOTDIR);
    CHECK(fstat(plain, &there) == 0 && S_ISREG(there.st_mode));
    close(plain);
}

/* Folders of the system of which ours are a part. */
static void from_above(void)
{
    int root = open("/", O_RDONLY | O_DIRECTORY), class = open("/sys/class", O_RDONLY);
    CHECK(faccessat(root, "sys/class/infiniband/quipu0/node_type", R_OK, 0) == 0);
    CHECK(faccessat(class, "infiniband/quipu0", R_OK, 0) == 0);
    FAILS(faccessat(root, "class/infiniband/quipu0", R_OK, 0), ENOENT);
    FAILS(faccessat(-1, "infiniband/quipu0", R_OK, 0), EBADF);
    CHECK(chdir("/sys/class") == 0);
    int file = open("infiniband/quipu0/node_type", O_RDONLY);
    CHECK(reads(file, "1: CA\n"));
    CHECK(chdir("/") == 0);
    FAILS(access("infiniband/quipu0", R_OK), ENOENT);
}

/* The descriptor of a folder that was opened by its path. */
static void of_listings(void)
{
    DIR *list = opendir(DEVICE "/ports");
    struct stat stat;
    int fd = dirfd(list);
    CHECK(fd >= 0 && dirfd(list) == fd && fstat(fd, &stat) == 0 && S_ISDIR(stat.st_mode));
    CHECK(fstatat(fd, "1/state", &stat, 0) == 0);
    struct dirent *entry = readdir(list);
    CHECK(entry && fstatat(fd, entry->d_name, &stat, 0) == 0 && stat.st_ino == entry->d_ino);
    CHECK(closedir(list) == 0);
    FAILS(fcntl(fd, F_GETFD), EBADF);
}

/* readdir_r has room for the longest of names, and for no more. */
static void room_for_an_entry(void)
{
    enum { ROOM = offsetof(struct dirent, d_name) + NAME_MAX + 1 };
    char *room = malloc(ROOM + 64);
    memset(room, 0x5a, ROOM + 64);
    DIR *list = opendir(DEVICE);
    struct dirent *entry = NULL;
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    CHECK(readdir_r(list, (struct dirent *)room, &entry) == 0 && entry);
    CHECK(entry->d_reclen <= ROOM && strcmp(entry->d_name, "device") == 0);
    for (int at = ROOM; at < ROOM + 64; at++)
        CHECK(room[at] == 0x5a);
    closedir(list);
    free(room);
}

int main(void)
{
    from_above();
    folders();
    others();
    of_listings();
    room_for_an_entry();
    return failures != 0;
}
