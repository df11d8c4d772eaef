// SPDX-License-Identifier: GPL-2.0
/* Test double of nvidia-uvm: a character major that the kernel chooses at load, which is what goes stale in files. */
#include <linux/cdev.h>
#include <linux/fs.h>
#include <linux/module.h>

int nvidia_cards(void);

static dev_t numbers;
static struct cdev device;

static int uvm_open(struct inode *inode, struct file *file)
{
	return nvidia_cards() ? 0 : -ENODEV;
}

static const struct file_operations operations = { .owner = THIS_MODULE, .open = uvm_open };

static int __init uvm_init(void)
{
	int status = alloc_chrdev_region(&numbers, 0, 2, "nvidia-uvm");

	if (status)
		return status;
	cdev_init(&device, &operations);
	status = cdev_add(&device, numbers, 2);
	if (status)
		unregister_chrdev_region(numbers, 2);
	return status;
}

static void __exit uvm_exit(void)
{
	cdev_del(&device);
	unregister_chrdev_region(numbers, 2);
}

module_init(uvm_init);
module_exit(uvm_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION(NV_VERSION);
MODULE_DESCRIPTION("Test double of nvidia-uvm");
